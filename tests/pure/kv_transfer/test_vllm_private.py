"""No module but `kv_transfer.vllm_private` touches a private member of vLLM, except those of its list `OVERRIDDEN`."""

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from kv_transfer import vllm_private
from kv_transfer.vllm_private import OVERRIDDEN
from tests import ROOT

# Where vLLM is subclassed or driven.
PACKAGES = ("imitated_gpu", "kv_transfer", "decode_worker", "prefill_worker", "shared_worker", "worker_runtime")
# Of Python itself: `os._exit`, and what named tuples offer.
PYTHONS_OWN = {"_exit", "_make", "_replace", "_asdict", "_fields"}

# Of torch, in `worker_runtime.gloo_device`: its own test fails where torch has no such class.
TORCHS_OWN = {"_Options"}


def named() -> dict[str, set[str]]:
    """By module, what the list of overridden methods says is touched there."""
    return {
        file.removesuffix(".py").replace("/", "."): {name.partition(".")[2] for name in names}
        for file, names in OVERRIDDEN.items()
    }


@dataclass(frozen=True, slots=True)
class Source:
    """Names that a module defines, and the private members that it touches, with what they are touched on."""

    defined: frozenset[str]
    touched: frozenset[tuple[str, str]]

    @classmethod
    def of(cls, text: str) -> "Source":
        defined, touched = set(), set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                defined.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                defined.add(node.id)
            elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                touched.add((ast.unparse(node.value), node.attr))
                if isinstance(node.ctx, ast.Store):
                    defined.add(node.attr)
        return cls(frozenset(defined), frozenset(touched))


def foreign(sources: Mapping[str, Source]) -> dict[str, set[str]]:
    """By module, private members that are not ours, as far as the text shows.

    On `self` or `cls`: those that no module defines. On `super()`: those that no other module defines, and all that the
    list names. On anything else: those that this module does not define.
    """
    ours = frozenset[str]().union(*(source.defined for source in sources.values()))
    theirs = set().union(*named().values())
    found = {}
    for module, source in sources.items():
        others = frozenset[str]().union(*(each.defined for name, each in sources.items() if name != module))
        known = {"self": ours, "cls": ours, "super()": others - theirs}
        names = {name for owner, name in source.touched if name not in known.get(owner, source.defined)}
        if module == "worker_runtime.gloo_device":
            names -= TORCHS_OWN
        if names - PYTHONS_OWN:
            found[module] = names - PYTHONS_OWN
    return found


@pytest.fixture(scope="module")
def sources() -> dict[str, Source]:
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts): Source.of(path.read_text()) for path in paths}


def test_private_members_are_touched_where_the_list_says_so(sources: dict[str, Source]) -> None:
    found = foreign(sources)
    assert found.pop("kv_transfer.vllm_private")
    assert found == named()


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("request._all_token_ids[:] = prompt", "_all_token_ids"),
        ("self._inflight_prefills.discard(request)", "_inflight_prefills"),
        ("super()._free_request(request)", "_free_request"),
        ("engine.engine_core.scheduler._preempt_request(request, 0.0)", "_preempt_request"),
    ],
)
def test_a_line_that_touches_one_elsewhere_is_noticed(sources: dict[str, Source], line: str, name: str) -> None:
    assert foreign({**sources, "prefill_worker.planted": Source.of(line)})["prefill_worker.planted"] == {name}


class Worker:
    """Of vLLM's pull worker, what a pull that is given up leaves behind."""

    def __init__(self) -> None:
        self.metas = {name: pull_meta() for name in ("begun", "handshaking", "other")}
        self._recving_metadata = dict(self.metas)
        self._recving_transfers = {"begun": [1, 2], "other": [3]}
        self._pending_recv_notifs: dict[str, list[str]] = {"begun": []}
        self._recv_failures: set[str] = {"begun"}


def pull_meta() -> SimpleNamespace:
    return SimpleNamespace(local_block_ids=([7, 8],), local_physical_block_ids=([7, 8],), awaiting_kvs=True)


def test_a_pull_that_is_given_up_leaves_nothing_but_its_handles_and_has_no_blocks_to_read_into() -> None:
    worker = Worker()
    connector = SimpleNamespace(connector_worker=worker)
    assert vllm_private.give_up_pull(connector, "begun") == [1, 2]
    assert vllm_private.give_up_pull(connector, "begun") is None
    assert vllm_private.give_up_pull(connector, "handshaking") == []
    assert (worker._recving_transfers, worker._pending_recv_notifs, worker._recv_failures) == (
        {"other": [3]},
        {},
        set(),
    )
    # Which the handshake's thread may queue at any time.
    voided = SimpleNamespace(local_block_ids=(), local_physical_block_ids=(), awaiting_kvs=False)
    assert worker.metas == {"begun": voided, "handshaking": voided, "other": pull_meta()}
