"""Commands, options and defaults stay as they are; the start of a command imports nothing that takes long."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from command_line.bench.group import COMMANDS as BENCH_COMMANDS
from command_line.main import COMMANDS, GROUPS
from tests.pure.command_line.command_tree import FILE, rendered, tree

ROOT = Path(__file__).parents[3]
# Each of them takes longer than everything else that a start imports.
HEAVY = {
    "torch", "vllm", "ray", "transformers", "tokenizers", "numpy", "redis", "matplotlib", "jinja2", "jsonschema",
    "pydantic",
}  # fmt: skip


def test_every_command_has_the_options_bounds_and_defaults_that_are_written_down() -> None:
    assert rendered() == FILE.read_text()


@pytest.mark.parametrize(("name", "command"), tree())
def test_every_command_says_in_a_sentence_what_it_does(name: str, command: object) -> None:
    help_text = getattr(command, "help", None)
    assert help_text and help_text.strip().splitlines()[0].endswith("."), name


def test_every_module_that_registers_a_command_is_collected() -> None:
    files = (file for file in (ROOT / "command_line").rglob("*.py") if "\ndef register(" in file.read_text())
    registering = {".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files}
    assert registering == {module.__name__ for module in (*COMMANDS, *GROUPS, *BENCH_COMMANDS)}


def test_the_start_of_a_command_imports_no_engine_and_nothing_else_that_takes_long() -> None:
    reached = set(_imported_at_start("command_line.main"))

    assert "command_line.bench.tiers" in reached
    assert not {name.partition(".")[0] for name in reached} & HEAVY
    assert not [name for name in reached if name.startswith("command_line.") and name.endswith("_run")]


def _imported_at_start(first: str) -> Iterator[str]:
    """All modules, of the project and others, that importing a module of the project imports; not what functions do."""
    waiting, known = [first], {first}
    while waiting:
        name = waiting.pop()
        yield name
        file = _file_of(name)
        found = set() if file is None else set(_imports(ast.parse(file.read_text()).body))
        waiting += found - known
        known |= found


def _imports(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            # A name may be a module.
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name for name in names if _file_of(name) is not None)


def _file_of(module: str) -> Path | None:
    """None: the module is not the project's."""
    paths = (folder.joinpath(*module.split(".")) for folder in (ROOT, ROOT / "protos"))
    candidates = (file for path in paths for file in (path.with_suffix(".py"), path / "__init__.py"))
    return next((file for file in candidates if file.exists()), None)
