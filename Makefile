# Everything Rachis needs is set up by these targets; nothing is installed by hand.
# `make demo` and `make test` are the two to know. PROFILE=cpu|gpu is found by looking for a GPU.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:
.SILENT:
# What Python has compiled is kept: compiling all modules and tests takes as long as a fifth of the pure tests.
unexport PYTHONDONTWRITEBYTECODE
.DEFAULT_GOAL := help

PYTHON ?= python3.11
VENV ?= .venv
PROFILE ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
# Where a CPU build of torch is found when the configured index has only the CUDA one.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
BIN := $(VENV)/bin
# Python compiles a module when it is first imported: most of the 26,000 that are installed never are.
PIP_INSTALL := install --disable-pip-version-check --no-deps --no-compile --quiet
# `$(INSTALL) python arguments`: uv takes a tenth of pip's time. Where pip is told of another index than PyPI, or of none,
# pip installs: uv does not read that. So it does where uv cannot, or is not to be had.
UV := $(BIN)/uv
INSTALL = install() { \
	if ! $(BIN)/pip config list | grep -qE '\.(index-url|no-index)=' \
		&& $(UV) pip install --quiet --no-deps --python $$1 "$${@:2}" 2>/dev/null; then return; fi; \
	$(BIN)/pip --python $$1 $(PIP_INSTALL) "$${@:2}"; }; install
ifeq ($(PROFILE),gpu)
export RACHIS_PROFILE ?= gpu-1node
endif
STAMP := $(VENV)/.rachis-$(PROFILE)
COMPILED := $(VENV)/.rachis-compiled
SDKS := $(VENV)/sdks
DOCS := $(VENV)/docs
TRITON := $(VENV)/triton
VARIANTS := $(VENV)/variants
RELEASE := $(VENV)/release
# Processes that tests are spread over: one more than cores, since some tests wait. With four of them on two cores all
# takes as long, and what is started is late more often.
WORKERS ?= 3
PYTEST := $(BIN)/python -m pytest -q
GROUPED := --dist loadscope --no-loadscope-reorder
SPREAD := -n $(WORKERS) $(GROUPED)
BUF := node_modules/.bin/buf

.PHONY: help setup sdks demo serve test pure process contract campaign integration secured variants test-hosts test-console families fuzz faults chaos check check-quick hooks protos map \
	docs docs-serve bench bench-papers bench-system bench-simulator lock release clean
help: ## Show the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(COMPILED) ## Create .venv from the lock file of the profile (cpu here, gpu where a GPU is found)

$(UV): requirements/uv.lock
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip $(PIP_INSTALL) --require-hashes -r requirements/uv.lock || echo "without uv it takes longer"
	touch $@

$(STAMP): requirements/$(PROFILE).lock requirements/torch-cpu.lock pyproject.toml | $(UV)
	pip="$(BIN)/pip $(PIP_INSTALL)"
	cpu_torch() {
		echo "installing torch (CPU build)"
		$$pip -r requirements/torch-cpu.lock 2>/dev/null \
			|| $$pip --index-url $(TORCH_CPU_INDEX) -r requirements/torch-cpu.lock
	}
	# Whatever fails, nobody writes there any more when this has ended.
	trap wait EXIT
	if [ "$(PROFILE)" = cpu ]; then cpu_torch & fi
	echo "installing $$(grep -c '==' requirements/$(PROFILE).lock) pinned packages"
	$(INSTALL) $(BIN)/python --require-hashes -r requirements/$(PROFILE).lock
	if [ "$(PROFILE)" = cpu ]; then wait $$!; fi
	$(INSTALL) $(BIN)/python --no-build-isolation -e .
	touch $@

# Where Python is told to write no bytecode, each process of an engine would compile these again. vLLM looks at the
# classes of a model in a process of its own, and keeps what it saw: each of several first engines would start one.
$(COMPILED): $(STAMP)
	$(BIN)/python -c "import ray, transformers, vllm.v1.engine.llm_engine; from vllm import ModelRegistry; \
		ModelRegistry.models['LlamaForCausalLM'].inspect_model_cls()" 2>/dev/null
	touch $@

sdks: $(SDKS)/.rachis ## Create .venv/sdks: what people build on, for the tests of the client's package

# Beside the environment, not in it: PyTorch would take Triton for a compiler.
$(TRITON)/.rachis: requirements/triton.lock | $(STAMP) $(UV)
	$(INSTALL) $(BIN)/python --target $(TRITON) --require-hashes -r requirements/triton.lock
	touch $@

$(VARIANTS)/.rachis: $(wildcard tests/engine_variants/* tests/engine_variants/*/*) | $(STAMP) $(UV)
	source=$$(mktemp --directory)
	cp -r tests/engine_variants $$source
	$(INSTALL) $(BIN)/python --target $(VARIANTS) --no-build-isolation --upgrade $$source/engine_variants
	rm -r $$source
	touch $@

$(SDKS)/.rachis: requirements/sdks.lock | $(UV)
	$(PYTHON) -m venv --without-pip $(SDKS)
	$(INSTALL) $(SDKS)/bin/python --require-hashes -r requirements/sdks.lock
	touch $@

demo: setup ## Bring the service up, answer three recall questions through both pools, stop
	$(BIN)/rachis demo

serve: setup ## Serve in the foreground until Ctrl-C
	$(BIN)/rachis serve

# Many hosts mostly wait, and so do the processes that run beside them; campaigns wait for nothing, and take what all
# others leave. Engines of all kinds come last: each of them wants a core, and many hosts beside them would be late.
ENGINES := tests --ignore=tests/hosts --ignore=tests/pure --ignore=tests/campaign --ignore=tests/process
test: setup sdks ## All tests, in order: of one core, processes beside many hosts, engines; campaigns beside all of them
	failed=0
	beside=$$(mktemp --directory)
	$(BIN)/python -m tests.hosts -q > $$beside/hosts 2>&1 &
	hosts=$$!
	# Where the kernel shares cores out among sessions (autogroup), niceness counts within one only: this one yields.
	setsid --wait bash -c '{ echo 19 > /proc/self/autogroup; } 2>/dev/null; exec nice -n 19 "$$@"' - $(PYTEST) tests/campaign \
		-n 2 $(GROUPED) > $$beside/campaign 2>&1 &
	campaign=$$!
	trap 'kill -- -$$campaign || true' INT TERM
	$(PYTEST) tests/pure || failed=1
	$(PYTEST) tests/process $(SPREAD) || failed=1
	wait $$hosts || failed=1
	$(PYTEST) $(ENGINES) $(SPREAD) || failed=1
	# Nothing of these tests is left to yield to; beside strangers it would get next to nothing.
	{ echo 0 > /proc/$$campaign/autogroup; renice -n 0 -g $$campaign; } > /dev/null 2>&1 || true
	wait $$campaign || failed=1
	cat $$beside/campaign $$beside/hosts
	rm -r $$beside
	exit $$failed

pure: $(STAMP) ## Decisions alone, no socket, thread, process or sleep: half a minute on one core, to run while editing
	$(PYTEST) tests/pure

process: setup ## Parts with their sockets and processes: gRPC on the loopback, embedded Redis
	$(PYTEST) tests/process $(SPREAD)

contract: setup ## What every engine, registry and transport promises, asked of fakes and of real ones
	$(PYTEST) tests/contract $(SPREAD)

campaign: setup ## Random sessions and fault plays with a few pinned seeds, and the planted bugs that they must find
	$(PYTEST) tests/campaign $(SPREAD)

integration: setup sdks ## Whatever needs a real engine, Redis, Ray or NIXL, in any tier
	$(PYTEST) tests --ignore=tests/hosts -m integration $(SPREAD)

secured: setup sdks ## The tests over real services once more, with TLS, keys and a cluster secret
	TESTS_SECURED=1 $(PYTEST) tests/integration $(SPREAD)

# Of v2 kernels are interpreted, and steps take several times as long.
VARIANT ?= async
variants: setup sdks $(TRITON)/.rachis $(VARIANTS)/.rachis ## The tests over real engines once more as GPUs run them: VARIANT=async|v2|v2-async
	case $(VARIANT) in async|v2|v2-async) ;; *) echo "VARIANT is async, v2 or v2-async, not $(VARIANT)"; exit 2;; esac
	[[ $(VARIANT) != v2* ]] || export PYTHONPATH=$(CURDIR)/$(TRITON) TRITON_INTERPRET=1
	export VLLM_USE_V2_MODEL_RUNNER=$$([[ $(VARIANT) == v2* ]] && echo 1 || echo 0) TESTS_VARIANT=$(VARIANT)
	export PYTHONPATH=$${PYTHONPATH:+$$PYTHONPATH:}$(CURDIR)/$(VARIANTS)
	$(PYTEST) $(or $(TESTS),tests/contract tests/integration) $(SPREAD)

test-hosts: setup ## `ray up` on three hosts made of namespaces, faults, `ray down`; as root, installs what it needs
	$(BIN)/python -m tests.hosts -q

test-console: setup $(BUF) ## The console in headless Chromium; as root, installs Debian's where none is on the PATH
	if ! command -v chromium chromium-browser google-chrome >/dev/null && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
		apt-get update --quiet=2
		DEBIAN_FRONTEND=noninteractive apt-get install --quiet=2 --no-install-recommends chromium
	fi
	$(PYTEST) tests/console -rs

families: setup ## What each model family can have, shown by tokens: writes the table of docs/models.md; ten minutes
	$(BIN)/python -m tests.families

fuzz: setup ## Random sessions, decode batches and grammars, simulated and on real engines, against fresh requests
	$(BIN)/python -m tests.campaign.fuzz simulated --sessions 10000
	$(BIN)/python -m tests.campaign.fuzz decode --requests 10000
	$(BIN)/python -m tests.campaign.fuzz shared --requests 10000
	$(BIN)/python -m tests.campaign.fuzz real --sessions 1000
	$(BIN)/python -m tests.campaign.fuzz real --shared --sessions 1000
	$(BIN)/python -m tests.structured --grammars 300 --kills 4

faults: setup ## 5,000 seeded runs of the whole service under faults, in simulated time; property tests with many examples
	$(BIN)/python -m fault_sim --runs 5000
	RACHIS_WIDE=1 $(BIN)/python -m pytest tests/pure -q -n 2

chaos: setup ## Ten minutes of faults on a real service of 2 + 2 workers and two routers, with 20 streams open
	$(BIN)/rachis chaos --minutes 10

check: check-quick $(BUF) ## ruff, mypy strict, import-linter, proto lint, generated files fresh, shape of the tree
	$(BIN)/mypy
	PYTHONPATH=protos $(BIN)/lint-imports
	$(BUF) lint protos
	cmp node_modules/htm/preact/standalone.module.js control_plane/console/static/vendor/htm-preact.js

check-quick: $(STAMP) ## The parts of `make check` that take seconds: ruff, generated files fresh, shape of the tree
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/generate_protos.py --check
	$(BIN)/python tools/structure.py --check
	$(BIN)/python -m tools.access_tables --check
	$(BIN)/python -m tools.family_table --check
	$(BIN)/python -m tools.console_runbooks --check
	$(BIN)/python -m tools.dashboards --check
	$(BIN)/python -m tools.reference --check
	$(BIN)/python -m tools.pictures --check

hooks: ## Checks before every commit: .pre-commit-config.yaml where pre-commit is installed, else `make check-quick`
	if command -v pre-commit >/dev/null; then
		pre-commit install
	else
		hook=$$(git rev-parse --git-path hooks)/pre-commit
		mkdir -p "$$(dirname "$$hook")"
		printf '#!/bin/sh\nexec make check-quick\n' > "$$hook"
		chmod +x "$$hook"
		echo "wrote $$hook"
	fi

protos: setup ## Regenerate the stubs beside the .proto files
	$(BIN)/python tools/generate_protos.py

map: setup ## Write docs/modules.md, the map of all modules, the tables of docs/access.md, docs/reference, dashboards, pictures
	$(BIN)/python tools/structure.py
	$(BIN)/python -m tools.access_tables
	$(BIN)/python -m tools.family_table
	$(BIN)/python -m tools.console_runbooks
	$(BIN)/python -m tools.dashboards
	$(BIN)/python -m tools.reference
	$(BIN)/python -m tools.pictures

docs: $(DOCS)/.rachis ## Build the documentation as a site in site/, without a warning; nothing in it needs the network
	# Not --quiet: strict mode does not count what is not printed.
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict
	$(DOCS)/bin/python tools/offline_site.py site

docs-serve: $(DOCS)/.rachis ## Show the documentation at http://127.0.0.1:8001, as it is edited
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs serve --dev-addr 127.0.0.1:8001

# The site needs nothing of the project's own environment.
$(DOCS)/.rachis: requirements/docs.lock | $(UV)
	$(PYTHON) -m venv --without-pip $(DOCS)
	$(INSTALL) $(DOCS)/bin/python --require-hashes -r requirements/docs.lock
	touch $@

bench: setup ## Latency and CPU that router and hand-off add
	$(BIN)/rachis bench overhead

bench-papers: setup ## Tables and figures of the three papers, beside the simulator's: benchmarks/results/papers-*.md
	$(BIN)/python -m benchmarks.papers

bench-system: setup ## The whole system against plain vLLM, a plain proxy and the published formula, simulated
	$(BIN)/rachis bench system

bench-simulator: setup ## The simulator's predictions against the service over imitated GPUs, a quarter of an hour
	$(BIN)/rachis bench simulator

# The CPU build of torch is not in the index of the others, and has no hash here: `make setup` takes it from wherever it is.
lock: $(UV) ## Resolve requirements/*.in again into the pinned lock files with the hashes of what they name
	pin="$(UV) pip compile --python-version 3.11.7 --python-platform x86_64-manylinux_2_28 --generate-hashes --no-annotate"
	for profile in cpu gpu; do
		without=$$([ $$profile = cpu ] && echo --no-emit-package torch || true)
		$$pin --no-header --quiet $(UV_FLAGS) requirements/$$profile.in requirements/dev.in $$without \
			--override requirements/$$profile-excludes.txt -o requirements/$$profile.lock
	done
	grep '^torch==' requirements/cpu.in > requirements/torch-cpu.lock
	for alone in uv sdks docs release triton; do
		$$pin --no-header --quiet $(UV_FLAGS) requirements/$$alone.in -o requirements/$$alone.lock
	done

release: $(RELEASE)/.rachis ## Make wheels, bills of materials and checksums of the last commit in dist/, the same bytes each time
	$(RELEASE)/bin/python tools/release.py

$(RELEASE)/.rachis: requirements/release.lock | $(UV)
	$(PYTHON) -m venv $(RELEASE)
	$(INSTALL) $(RELEASE)/bin/python --require-hashes -r requirements/release.lock
	touch $@

$(BUF): package-lock.json
	npm install --no-save --no-audit --no-fund --loglevel=error
	touch $@

clean: ## Remove what the targets above created
	rm -rf $(VENV) node_modules site dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache build *.egg-info
