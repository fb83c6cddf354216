"""The pages of `docs/reference` have all that there is to be described; that they are up to date is `make check`'s."""

import re
from collections.abc import Iterable

import pytest
from rachis.v1 import admin_pb2, generation_pb2, router_pb2, worker_pb2

from cluster_configs.loading import load, profile_names
from cluster_core.errors import RachisError
from cluster_wire.http_status import BAD_INPUT, OF_ACCESS, OF_CLUSTER, http_status
from control_plane.access.roles import HTTP_NEEDS, RPC_NEEDS
from control_plane.console.pages import ROUTES as CONSOLE_ROUTES
from control_plane.metrics.families import pool_label
from control_plane.metrics.probe_server import ROUTES
from tests import ROOT
from tests.pure.command_line.command_tree import tree
from tools.metric_entries import GATEWAY, ROUTER, entries
from tools.reference import errors
from tools.reference.labels import LABELS
from tools.reference.table import code, prose, table

FOLDER = ROOT / "docs" / "reference"
PROTOS = (router_pb2, generation_pb2, admin_pb2, worker_pb2)
# Names of metrics in the code that defines them, whatever is made of them there.
_METRIC = re.compile(r'"(rachis_\w+)"')
_FIRST_CELL = re.compile(r"^\| (?:`([^`]+)`|<code>([^<]+)</code>)", re.MULTILINE)


def read(page: str) -> str:
    return (FOLDER / page).read_text()


def first_cells(text: str) -> set[str]:
    """What the rows of all tables are about."""
    return {one or other for one, other in _FIRST_CELL.findall(text)}


def headings(text: str) -> set[str]:
    return set(re.findall(r"^#+ (.+)$", text, re.MULTILINE))


def section(text: str, heading: str) -> str:
    return text.partition(f"\n{heading}\n")[2].partition("\n## ")[0]


def without_total(names: Iterable[str]) -> set[str]:
    return {name.removesuffix("_total") for name in names}


def test_every_configuration_key_is_described() -> None:
    keys = {entry.key for entry in load().entries}
    described = section(f"\n{read('configuration.md')}", "# Configuration")
    assert len(keys) > 150
    assert keys <= first_cells(read("configuration.md"))
    assert {f"## {key.partition('.')[0]}" for key in keys if "." in key} <= {
        line for line in read("configuration.md").splitlines() if line.startswith("## ")
    }
    assert described.startswith("\nWritten by `make map`")


def test_every_profile_is_there_with_what_it_changes() -> None:
    page = read("configuration.md").partition("## What profiles change")[2]
    for name in profile_names():
        rows = first_cells(page.partition(f"### {name}\n")[2].partition("###")[0])
        assert rows == {entry.key for entry in load(profile=name).entries if entry.source == "profile"}


def test_every_metric_is_described_with_its_kind_and_what_it_says() -> None:
    sources = [*(ROOT / "control_plane" / "metrics").glob("*.py"), *GATEWAY]
    named = without_total(name for source in sources for name in _METRIC.findall(source.read_text()))
    assert len(named) > 100
    described = read("metrics.md").partition("\n## Labels and their bounds\n")[0]
    assert without_total(first_cells(described)) == named
    found = entries(ROUTER) + entries(GATEWAY)
    assert all(entry.help and entry.kind in ("gauge", "counter", "histogram") for entry in found)
    assert len({entry.name for entry in found}) == len(found)


def test_every_call_message_and_value_of_the_protos_is_described() -> None:
    page = read("grpc.md")
    cells, names = first_cells(page), headings(page)
    for file in (proto.DESCRIPTOR for proto in PROTOS):
        for service in file.services_by_name.values():
            assert service.name in names
            assert {method.name for method in service.methods} <= cells
        for message in file.message_types_by_name.values():
            rows = first_cells(page.partition(f"\n### {message.name}\n")[2].partition("\n### ")[0])
            assert {field.name for field in message.fields} == rows, message.name
        for enum in file.enum_types_by_name.values():
            assert enum.name in names
            assert {value.name for value in enum.values} <= cells
    ours = {name.rpartition("/")[2] for name in RPC_NEEDS if name.startswith("/rachis.")}
    assert ours <= cells


def test_every_command_is_described_with_its_options() -> None:
    page = read("commands.md")
    for name, command in tree():
        described = section(page, f"## {name}")
        assert described, name
        params = [each for each in command.params if not getattr(each, "hidden", False)]
        options = {option for parameter in params for option in (*parameter.opts, *parameter.secondary_opts)}
        arguments = {each.name.upper() for each in params if each.param_type_name == "argument"}
        shown = set(re.findall(r"`(-[^`]+|[A-Z_]+)`", described))
        assert {option for option in options if option.startswith("-")} | arguments <= shown, name


def test_every_error_and_every_status_is_described() -> None:
    page = read("errors.md")
    kinds = list(errors.below(RachisError))
    assert len(kinds) > 15
    assert {kind.__name__ for kind in kinds} <= first_cells(page)
    assert {kind.status for kind in kinds} <= first_cells(page)
    assert all(kind.__doc__ for kind in kinds)


def test_every_route_is_described() -> None:
    assert {*HTTP_NEEDS, *ROUTES, *CONSOLE_ROUTES} == first_cells(read("http.md"))


def test_a_status_of_no_table_is_a_failure_of_the_service() -> None:
    assert http_status("INTERNAL") == 500
    assert {http_status(status).value for status in BAD_INPUT} == {400}
    assert {status: http_status(status) for status in (*OF_ACCESS, *OF_CLUSTER)} == {**OF_ACCESS, **OF_CLUSTER}


def test_a_row_that_is_left_out_is_found() -> None:
    page = read("configuration.md")
    less = re.sub(r"^\| `router.port` .*\n", "", page, flags=re.MULTILINE)
    assert first_cells(page) - first_cells(less) == {"router.port"}


@pytest.mark.parametrize(("text", "shown"), [("a_b", "`a_b`"), ("a|<b", "<code>a&#124;&lt;b</code>"), ("a<b", "`a<b`")])
def test_code_with_a_stroke_does_not_end_its_cell(text: str, shown: str) -> None:
    assert code(text) == shown


def test_a_cell_is_one_line() -> None:
    assert table(("a", "b"), [("one\ntwo", prose("x | y"))]) == "| a | b |\n|---|---|\n| one two | x &#124; y |\n"


def test_the_label_of_a_pool_has_all_pools() -> None:
    (label,) = [label for label in LABELS if label.name == "pool"]
    pools = {pool_label(pool) for pool in worker_pb2.Pool.values() if pool != worker_pb2.POOL_UNSPECIFIED}
    assert set(re.findall(r"`(\w+)`", label.values)) == pools and label.most == len(pools)
