"""Alerts and runbooks belong together one by one. What a runbook names exists: commands, options, figures, settings."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.core import TyperGroup

from cluster_configs.loading import load
from control_plane.metrics.probe_server import LIVE_TIMEOUT_S
from tests import ROOT
from tests.command import command_tree
from tests.prometheus import alert_rules
from tests.pure.docs.console import commands, parse

FOLDER = ROOT / "docs" / "runbooks"
RUNBOOKS = sorted(path for path in FOLDER.glob("*.md") if path.name != "README.md")
SECTIONS = ["Symptom", "Meaning", "Look here", "Do this", "It is over when"]
# Beside `rachis` itself.
PROGRAMS = {"curl", "grep", "redis-cli"}
ENTRIES = {entry.key for entry in load().entries}
CONFIG_SECTIONS = {key.partition(".")[0] for key in ENTRIES}


def inline(text: str) -> list[str]:
    """Code within sentences."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def check_mention(line: str) -> None:
    """A command that a sentence names, possibly without its arguments: it and its options exist."""
    command: Any = command_tree()
    words = shlex.split(line)[1:]
    while isinstance(command, TyperGroup) and words:
        name = words.pop(0)
        assert name in command.commands, line
        command = command.commands[name]
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("-")} <= known, line


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    assert [path.stem for path in RUNBOOKS] == sorted(alert_rules())


def test_the_index_lists_every_alert_with_its_severity() -> None:
    rows = re.findall(r"^\| \[(\w+)\]\((\w+)\.md\) \| (\w+) \|", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert all(name == file for name, file, _ in rows)
    assert {name: severity for name, _, severity in rows} == {
        name: rule["labels"]["severity"] for name, rule in alert_rules().items()
    }
    assert len(rows) == len(RUNBOOKS)


def test_the_index_says_of_every_alert_how_it_was_tried() -> None:
    tried = (FOLDER / "README.md").read_text().partition("## How they were tried")[2]
    assert {path.stem for path in RUNBOOKS} <= set(re.findall(r"\w+", tried))


@pytest.mark.parametrize("path", RUNBOOKS, ids=lambda path: path.stem)
def test_a_runbook_has_its_sections_and_something_to_type(path: Path) -> None:
    text = path.read_text()
    severity = alert_rules()[path.stem]["labels"]["severity"]
    assert text.startswith(f"# {path.stem}\n\n**{severity.capitalize()}.** ")
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == SECTIONS
    assert commands(text.partition("## Look here")[2].partition("## Do this")[0])


@pytest.mark.parametrize("path", [*RUNBOOKS, FOLDER / "README.md"], ids=lambda path: path.stem)
def test_commands_options_and_settings_exist(path: Path) -> None:
    text = path.read_text()
    for line in commands(text):
        for part in line.split(" | "):
            program = shlex.split(part)[0]
            assert program == "rachis" or program in PROGRAMS, line
            if program == "rachis":
                parse(part)
    for code in inline(text):
        if code.startswith("rachis "):
            check_mention(code)
        elif re.fullmatch(r"[a-z]+(\.[a-z_]+)+", code) and code.partition(".")[0] in CONFIG_SECTIONS:
            assert any(entry == code or entry.startswith(f"{code}.") for entry in ENTRIES), code


@pytest.mark.parametrize(
    "line", ["rachis stats", "rachis drain --leave", "rachis scale", "rachis restart --all", "rachis index check --now"]
)
def test_commands_that_do_not_exist_are_found(line: str) -> None:
    with pytest.raises(Exception, match=r"(?i)no such|missing"):
        parse(line)


def test_prometheus_is_told_to_look_often_enough_to_see_an_engine_hang() -> None:
    """Before its process ends itself: one scrape finds it, one evaluation sees that, and another one that it lasts."""
    (snippet,) = re.findall(r"```yaml\n(.*?)```", (FOLDER / "README.md").read_text(), re.DOTALL)
    told = yaml.safe_load(snippet)["global"]
    scrape_s, evaluation_s = (int(told[f"{what}_interval"].removesuffix("s")) for what in ("scrape", "evaluation"))
    lasts_s = int(alert_rules()["RachisWorkerHangs"]["for"].removesuffix("s"))
    assert scrape_s + evaluation_s + max(lasts_s, evaluation_s) < load().config.limits.stall_timeout_s


def test_a_router_that_hangs_says_what_its_runbook_shows() -> None:
    said = f"the router has not answered for {LIVE_TIMEOUT_S:g} s"
    assert said in (FOLDER / "RachisRouterDown.md").read_text().splitlines()


@pytest.mark.parametrize("path", RUNBOOKS, ids=lambda path: path.stem)
def test_whoever_drains_a_host_is_told_how_it_comes_back(path: Path) -> None:
    for step in re.split(r"^\d+\. ", path.read_text().partition("## Do this")[2], flags=re.MULTILINE):
        if "`rachis drain" in step:
            assert "--resume`" in step or "#taking-a-host-out" in step, step


@pytest.mark.parametrize("path", [*RUNBOOKS, FOLDER / "README.md"], ids=lambda path: path.stem)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text()):
        assert (path.parent / target).exists(), target
