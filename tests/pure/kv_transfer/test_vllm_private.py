"""What is private to vLLM is touched in one module, and overridden where its list says so."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from kv_transfer.vllm_private import OVERRIDDEN

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("kv_transfer", "decode_worker")
# Their classes are bases of some in these folders.
ABOVE = ("worker_runtime",)
FILES = {
    path.relative_to(ROOT).as_posix(): path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path.name != "vllm_private.py"
}
# Of named tuples.
STANDARD = {"_make", "_replace", "_asdict", "_fields"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined(tree: ast.AST) -> Iterator[str]:
    """Private names that a module gives to methods, fields and functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def through_super(tree: ast.AST) -> set[str]:
    """Private names of base classes that a module calls past its own."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and is_private(node.attr)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        and node.value.func.id == "super"
    }


TREES = {file: ast.parse(path.read_text()) for file, path in FILES.items()}
OWN = {
    name
    for folder in (*FOLDERS, *ABOVE)
    for path in (ROOT / folder).rglob("*.py")
    for name in defined(ast.parse(path.read_text()))
}


def foreign(tree: ast.AST) -> set[str]:
    """Private names that a module reads and that none of these modules defines."""
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and is_private(node.attr)}
    return used - OWN - STANDARD


@pytest.mark.parametrize("file", FILES)
def test_a_module_touches_nothing_private_of_another_library(file: str) -> None:
    assert not foreign(TREES[file]), "belongs into kv_transfer/vllm_private.py"
    overridden = {name.partition(".")[2] for name in OVERRIDDEN.get(file, ())}
    assert through_super(TREES[file]) == overridden, "OVERRIDDEN lists what a subclass calls of its base"


def test_the_list_of_overridden_methods_names_files_that_are_there() -> None:
    assert {file for file in OVERRIDDEN if file.startswith(FOLDERS)} <= FILES.keys()


def test_a_module_that_reads_a_private_field_is_noticed() -> None:
    assert foreign(ast.parse("def f(scheduler): return scheduler._inflight_prefills")) == {"_inflight_prefills"}
    assert through_super(ast.parse("class A:\n    def _f(self): super()._f()")) == {"_f"}
