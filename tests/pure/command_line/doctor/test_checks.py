"""The checks of `rachis doctor`: nothing on a service that is well, and each planted defect exactly its finding."""

import re
from dataclasses import replace

import pytest

from cluster_configs.loading import load, profile_names
from cluster_core.versions import Versions
from command_line.doctor.checks import CHECKS
from command_line.doctor.findings import Severity, examine
from command_line.doctor.seen import Part, Seen
from command_line.doctor.setting_checks import RULES, mechanisms
from tests import ROOT
from tests.prometheus import alert_rules
from tests.pure.command_line.doctor import planted_router, planted_settings, planted_use, planted_workers
from tests.pure.command_line.doctor.world import Plant, Planted, found, healthy, missing

ROOMS = (planted_workers, planted_router, planted_use, planted_settings)
PLANTED = [planted for room in ROOMS for planted in room.PLANTED]
WELL = {what: plant for room in ROOMS for what, plant in room.WELL.items()}
TELLS = {**planted_workers.TELLS, **planted_router.TELLS, **planted_use.TELLS}
PAGE = ROOT / "docs" / "doctor.md"


def test_nothing_is_found_on_a_service_that_is_well_and_everything_is_checked() -> None:
    report = examine(CHECKS, healthy())
    assert (list(report.findings), list(report.not_checked)) == ([], [])


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: f"{planted.check}-{planted.subject}")
def test_each_defect_is_exactly_its_finding(planted: Planted) -> None:
    findings = found(planted.plant(healthy()))
    assert {finding.check for finding in findings} == {planted.check}, findings
    told = [finding.sentence for finding in findings if finding.subject == planted.subject]
    assert len(told) == 1 and planted.says in told[0], findings


@pytest.mark.parametrize("what", WELL)
def test_what_is_well_or_told_already_is_not_found(what: str) -> None:
    findings = found(WELL[what](healthy()))
    assert [finding.check for finding in findings] == ([TELLS[what]] if what in TELLS else []), findings


def test_every_check_and_every_mechanism_has_a_defect_that_it_finds() -> None:
    assert {planted.check for planted in PLANTED} == {check.name for check in CHECKS}
    subjects = {planted.subject for planted in PLANTED if planted.check == "mechanisms"}
    assert subjects == {rule.key for rule in RULES}


def test_a_defect_is_not_found_by_a_table_without_its_check() -> None:
    for planted in PLANTED:
        others = [check for check in CHECKS if check.name != planted.check]
        assert not examine(others, planted.plant(healthy())).findings


@pytest.mark.parametrize("profile", profile_names())
def test_no_profile_asks_for_what_cannot_fire(profile: str) -> None:
    loaded = load(profile=profile, flags={"model.name": "imitated-m"})
    sources = {entry.key: entry.source for entry in loaded.entries}
    seen = Seen(now_unix_s=0, here=Versions(), router=healthy().router, config=loaded.config, sources=sources)
    assert list(mechanisms(seen)) == []


@pytest.mark.parametrize("part", list(Part))
def test_what_could_not_be_seen_is_named_and_not_judged(part: Part) -> None:
    report = examine(CHECKS, missing(part)(healthy()))
    needing = {check.name for check in CHECKS if part in check.needs}
    assert needing
    assert {(each.check, each.why) for each in report.not_checked} == {(name, "not reached") for name in needing}
    assert not report.findings


@pytest.mark.parametrize(
    ("what", "check", "why"),
    [
        ("a hand-off that was not needed", "handoff", "compute a prompt of 577 tokens (short_remainder)"),
        ("a second time that another worker had", "prefix_cache", "no worker has got the same prompt twice"),
        ("a prompt that others have pushed out of the cache since", "prefix_cache", "as much since as its cache holds"),
        ("a probe that gave way to others", "answers", "it is best effort, and others had to be served"),
        ("no decode worker, told once", "answers", "no decode worker may get requests"),
        ("no prefill worker, told once", "handoff", "no prefill worker may get requests"),
    ],
)
def test_a_probe_that_says_nothing_is_named(what: str, check: str, why: str) -> None:
    not_checked = {each.check: each.why for each in examine(CHECKS, WELL[what](healthy())).not_checked}
    assert why in not_checked[check]


def test_workers_that_the_index_could_not_be_compared_with_are_named() -> None:
    def unanswered(seen: Seen) -> Seen:
        check = seen.claims[0]
        check.error = "it is starting"
        return replace(seen, claims=[check, *seen.claims[1:]])

    [each] = examine(CHECKS, unanswered(healthy())).not_checked
    assert (each.check, each.why) == ("index_claims", "prefill-0 could not be compared with the index: it is starting")


def test_the_most_severe_come_first() -> None:
    seen = healthy()
    plants: list[Plant] = [planted.plant for planted in PLANTED if planted.check in ("index_size", "clocks", "poison")]
    for plant in plants:
        seen = plant(seen)
    severities = [finding.severity for finding in found(seen)]
    assert severities == sorted(severities, key=list(Severity).index) and len(set(severities)) == 3


def test_names_are_given_once_and_severities_are_those_of_the_alerts() -> None:
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    alerts = alert_rules()
    lesser = {"index_away", "command_version"}
    for check in CHECKS:
        alert = re.fullmatch(r"runbooks/(\w+)\.md", check.page)
        if alert and check.name not in lesser:
            assert check.severity == alerts[alert[1]]["labels"]["severity"], check.name


def test_the_page_that_helps_is_there() -> None:
    for check in CHECKS:
        path, _, anchor = check.page.partition("#")
        text = (ROOT / "docs" / path).read_text()
        headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert not anchor or anchor in anchors, check.page


def test_the_guide_lists_every_check_in_the_order_of_the_table() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|", PAGE.read_text(), re.MULTILINE)
    assert rows == [(check.name, check.severity.value) for check in CHECKS]
