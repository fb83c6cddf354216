"""docs/deploy.md against what it speaks of: arithmetic, commands, configuration keys, links."""

import re
import shlex

import pytest
from typer.core import TyperGroup

from cluster_configs import loading
from tests import ROOT
from tests.command import command_tree

TEXT = (ROOT / "docs" / "deploy.md").read_text()
GIB = 1 << 30

KV_ROWS = re.findall(
    r"^\| (\S+/\S+) \| (\d+) \| (\d+) \| (\d+) \| ([\d,]+) \| ([\d.]+) GiB \| ([\d.]+) s \| ([\d.]+) s \|$", TEXT, re.M
)
COMMANDS = re.findall(r"(?:^|[`'])(rachis [a-z][^`'\n#]*)", TEXT, re.M)
# Those of the cluster file begin with `provider`.
KEYS = {
    key
    for key in re.findall(r"`(?!provider)([a-z]+\.[a-z_.]+)`", TEXT)
    if not key.endswith((".yaml", ".json", ".service"))
}


def test_kv_table_has_its_models() -> None:
    assert len(KV_ROWS) >= 8


@pytest.mark.parametrize("row", KV_ROWS, ids=lambda row: row[0])
def test_kv_bytes_are_two_times_layers_heads_dimension_and_bytes_of_a_number(row: tuple[str, ...]) -> None:
    layers, heads, dimension = map(int, row[1:4])
    kv_bytes = 2 * layers * heads * dimension * 2
    assert int(row[4].replace(",", "")) == kv_bytes
    prompt_bytes = 8192 * kv_bytes
    shown = [prompt_bytes / GIB, prompt_bytes * 8 / 10e9, prompt_bytes * 8 / 100e9]
    assert [float(value) for value in row[5:]] == pytest.approx(shown, abs=0.006)


def test_tokens_of_the_worked_example() -> None:
    assert "(24 x 0.85 - 8 - 2) GB / 147,456 = about 70,000 tokens" in TEXT
    assert round((24e9 * 0.85 - 8e9 - 2e9) / 147_456, -4) == 70_000


@pytest.mark.parametrize("command", sorted(set(COMMANDS)))
def test_command_is_one_that_there_is(command: str) -> None:
    words = shlex.split(command)[1:]
    given = command_tree()
    while isinstance(given, TyperGroup) and words:
        assert words[0] in given.commands
        given, words = given.commands[words[0]], words[1:]
    options = {option for parameter in given.params for option in parameter.opts}
    assert [word for word in words if word.startswith("--") and word not in options] == []


def test_configuration_keys_are_those_of_the_schema() -> None:
    valid = {entry.key for entry in loading.load().entries}
    assert "router.port" in KEYS
    assert KEYS - valid == set()


def test_links_lead_somewhere() -> None:
    targets = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", TEXT)]
    missing = [target for target in targets if target and not (ROOT / "docs" / target).exists()]
    assert missing in ([], ["runbooks/README.md"])


def test_defaults_of_the_autoscaling_table_are_in_force() -> None:
    autoscale = loading.load().config.pools.decode.autoscale
    rows = dict(re.findall(r"^\| `(\w+)`(?:, `\w+`)? \| ([\d., ]+) \|", TEXT, re.M))
    assert float(rows["waiting_per_worker"]) == autoscale.waiting_per_worker
    assert float(rows["grow_after_s"]) == autoscale.grow_after_s
    assert float(rows["shrink_below"]) == autoscale.shrink_below
    assert float(rows["shrink_after_s"]) == autoscale.shrink_after_s
    assert rows["min_workers"] == f"{autoscale.min_workers}, {autoscale.max_workers}"
