"""Checks the shape of the tree, and writes the map of its modules: `docs/modules.md`.

`python tools/structure.py` writes the map; `--check` prints every place that breaks a rule, and exits with 1:
    no module over 400 lines         generated code and the one literal table aside
    no function over 60 lines
    no constructor over 8 parameters (`__init__`; the fields of a frozen record are data)
    no cycle between modules         imports inside functions and for types alone count, too
    every module says in its first line what it owns, and the map repeats it
    no test patches or reads what is private without a comment that says why, in its line or right above;
                                     code of others, and tables of planted bugs (`planted*.py`), aside
"""

import argparse
import ast
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from io import StringIO
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    "command_line", "control_plane", "shared_worker", "prefill_worker", "decode_worker", "worker_runtime",
    "kv_transfer", "protos", "cluster_wire", "cluster_core", "cluster_configs", "builtin_model", "cluster_sim",
    "fault_sim", "imitated_gpu", "benchmarks", "tools", "tests",
)  # fmt: skip
MAP = Path("docs/modules.md")
MOST_MODULE_LINES = 400
MOST_FUNCTION_LINES = 60
MOST_CONSTRUCTOR_PARAMETERS = 8
# Every configuration key, its bounds and its description: one table, read from top to bottom.
LITERAL_TABLE = Path("cluster_configs/schema.py")
# Tests that patch and read what is private by trade: they plant bugs, or guard the private names of vLLM.
BY_TRADE = re.compile(r"planted\w*\.py|planting\.py|test_vllm_private\w*\.py")
PATCHES = frozenset({"setattr", "setitem", "delattr", "delitem"})
# What named tuples offer.
NOT_PRIVATE = frozenset({"_asdict", "_fields", "_make", "_replace"})
# What mypy says of a method that is assigned to.
METHOD = "[method-assign"
# A comment for a tool alone is no reason.
NO_REASON = re.compile(r"# (type: ignore|noqa|fmt:)[^#]*")


@dataclass(frozen=True, slots=True)
class Module:
    """name: dotted. nodes: of its whole tree. statement: the first line of its docstring."""

    path: Path
    name: str
    text: str
    nodes: tuple[ast.AST, ...]
    statement: str

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    @property
    def package(self) -> str:
        is_package = self.path.name == "__init__.py"
        return self.name if is_package else self.name.rpartition(".")[0]


def modules() -> dict[str, Module]:
    """Every module of the project that a person wrote, by its dotted name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.stem.endswith(("_pb2", "_pb2_grpc")):
                continue
            module = module_of(path.relative_to(ROOT), path.read_text())
            found[module.name] = module
    return found


def module_of(within: Path, text: str) -> Module:
    """within: the tree."""
    tree = ast.parse(text)
    parts = [part for part in within.with_suffix("").parts if part != "protos"]
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return Module(within, name, text, tuple(ast.walk(tree)), (ast.get_docstring(tree) or "").partition("\n")[0])


def findings(known: Mapping[str, Module]) -> Iterator[str]:
    for module in known.values():
        yield from _too_large(module)
        if not module.statement and module.lines:
            yield f"{module.path}: has no docstring that says what it owns"
        if module.path.parts[0] == "tests":
            yield from unexplained(module)
    cycle = _cycle(known)
    if cycle:
        yield f"modules import each other in a circle: {' -> '.join(cycle)}"


def module_map(known: Mapping[str, Module]) -> str:
    """One table for each package, tests aside."""
    lines = ["# Modules", "", "Written by `make map` from the first line of each module; `make check` compares.", ""]
    packages = sorted({module.package for module in known.values()}, key=_order)
    for package in packages:
        members = [each for each in known.values() if each.package == package and each.path.name != "__init__.py"]
        if package.startswith(("tests", "tools")) or not members:
            continue
        head = known.get(package)
        folder = members[0].path.parent
        lines += [f"## {folder}", ""]
        if head is not None and head.statement:
            lines += [head.statement, ""]
        lines += ["| module | what it owns |", "|---|---|"]
        lines += [f"| [{each.path.name}](../{each.path}) | {each.statement} |" for each in members]
        lines += [""]
    return "\n".join(lines)


def _order(package: str) -> tuple[int, str]:
    first = package.split(".")[0]
    return (PACKAGES.index(first) if first in PACKAGES else len(PACKAGES), package)


def _too_large(module: Module) -> Iterator[str]:
    if module.lines > MOST_MODULE_LINES and module.path != LITERAL_TABLE:
        yield f"{module.path}: {module.lines} lines, {MOST_MODULE_LINES} are the most"
    for node in module.nodes:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > MOST_FUNCTION_LINES:
            yield f"{module.path}:{node.lineno}: `{node.name}` has {length} lines, {MOST_FUNCTION_LINES} are the most"
        if node.name == "__init__":
            count = len(node.args.posonlyargs) + len(node.args.args) + len(node.args.kwonlyargs) - 1
            if count > MOST_CONSTRUCTOR_PARAMETERS:
                yield (
                    f"{module.path}:{node.lineno}: a constructor of {count} parameters, "
                    f"{MOST_CONSTRUCTOR_PARAMETERS} are the most"
                )


def unexplained(module: Module) -> Iterator[str]:
    """Where a test patches or reads what is private in the project's own code, and no comment says why.

    One comment is enough for lines that follow each other.
    """
    if BY_TRADE.fullmatch(module.path.name):
        return
    foreign = _imported_from_others(module.nodes)
    comments = _comments(module.text)
    places = {(line, line, "a method is replaced") for line, comment in comments.items() if METHOD in comment}
    for node in module.nodes:
        if not _is_of_others(_target(node), foreign):
            places |= set(_past_the_ports(node))
    reasons = {line for line, comment in comments.items() if not NO_REASON.fullmatch(comment)}
    texts = module.text.splitlines()
    # Lines below which nothing needs a reason of its own: comments alone in their line, and what they explain.
    explained = {line for line in reasons if texts[line - 1].lstrip().startswith("#")}
    for first, last, what in sorted(places):
        its_lines = {*range(first, last + 1)}
        if {first - 1, first} & explained or its_lines & reasons:
            explained |= its_lines
        else:
            yield f"{module.path}:{first}: {what}, and no comment says why"


def _past_the_ports(node: ast.AST) -> Iterator[tuple[int, int, str]]:
    """The first line and the last, and what is done there."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr in PATCHES or _is_mock_patch(node.func):
            yield node.lineno, node.end_lineno or node.lineno, f"`{ast.unparse(node.func)}`"
    elif isinstance(node, ast.Attribute) and re.match("_[a-z]", node.attr) and node.attr not in NOT_PRIVATE:
        owner = ast.unparse(node.value)
        if owner not in ("self", "cls", "super()"):
            end_line = node.end_lineno or node.lineno
            yield end_line, end_line, f"`{node.attr}` of `{owner}` is private"


def _is_mock_patch(called: ast.Attribute) -> bool:
    """`mock.patch`, and what hangs on it."""
    while isinstance(called.value, ast.Attribute):
        called = called.value
    return called.attr == "patch" and isinstance(called.value, ast.Name) and called.value.id == "mock"


def _target(node: ast.AST) -> ast.AST:
    """What is patched, or whose attribute is read."""
    return node.args[0] if isinstance(node, ast.Call) and node.args else node


def _is_of_others(node: ast.AST, foreign: Set[str]) -> bool:
    """`os.path.join` and the text "os.path" are, where `os` is nothing of the project. What a call returns is not."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    if isinstance(node, ast.Constant):
        return not _is_ours(str(node.value))
    return isinstance(node, ast.Name) and node.id in foreign


def _imported_from_others(nodes: Iterable[ast.AST]) -> set[str]:
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names if not _is_ours(alias.name)}
        elif isinstance(node, ast.ImportFrom) and not _is_ours(node.module or ""):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in (*PACKAGES, "rachis")


def _comments(text: str) -> dict[int, str]:
    """By their lines."""
    tokens = tokenize.generate_tokens(StringIO(text).readline)
    return {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}


def _cycle(known: Mapping[str, Module]) -> list[str]:
    """The modules of one circle of imports, or none."""
    sorter = TopologicalSorter({name: _imports(module, known) for name, module in known.items()})
    try:
        sorter.prepare()
    except CycleError as error:
        circle: list[str] = error.args[1]
        return circle
    return []


def _imports(module: Module, known: Mapping[str, Module]) -> set[str]:
    named: set[str] = set()
    for node in module.nodes:
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            named |= {
                f"{node.module}.{alias.name}" if f"{node.module}.{alias.name}" in known else node.module
                for alias in node.names
            }
    return {name for name in named if name in known and name != module.name}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 where a rule is broken")
    options = parser.parse_args(arguments)
    known = modules()
    text = module_map(known)
    if not options.check:
        (ROOT / MAP).write_text(text)
        return 0
    found = list(findings(known))
    if not (ROOT / MAP).exists() or (ROOT / MAP).read_text() != text:
        found.append(f"{MAP} is not up to date: run `make map`")
    print(
        "\n".join(found)
        or "structure: nothing too large, no circle, no patch in a test without a reason, map up to date"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
