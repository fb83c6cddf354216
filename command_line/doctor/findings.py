"""What checks are made of, and what they come to: findings, and what could not be checked. Pure."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from command_line.doctor.seen import Part, Seen


class Severity(StrEnum):
    """As of alerts: somebody is to be woken; the next working day will do; good to know."""

    CRITICAL = "critical"
    WARNING = "warning"
    INFO = "info"


@dataclass(frozen=True, slots=True)
class Fault:
    """subject: a worker, a pool, a setting, a part of the service. sentence: what is wrong, and with what."""

    subject: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Unknown:
    """What a check has seen says nothing, and why."""

    why: str


Verdicts = Iterator[Fault | Unknown]


@dataclass(frozen=True, slots=True)
class Check:
    """looks: whether something is wrong; nothing comes where all is well. page: under `docs`, which helps."""

    name: str
    severity: Severity
    page: str
    looks: Callable[[Seen], Verdicts]
    needs: Sequence[Part] = ()


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    severity: Severity
    subject: str
    sentence: str
    runbook: str


@dataclass(frozen=True, slots=True)
class NotChecked:
    check: str
    why: str


@dataclass(frozen=True, slots=True)
class Report:
    """findings: the most severe first."""

    findings: Sequence[Finding]
    not_checked: Sequence[NotChecked]


def examine(checks: Sequence[Check], seen: Seen) -> Report:
    """Makes all checks whose parts were seen."""
    findings: list[Finding] = []
    not_checked: list[NotChecked] = []
    for check in checks:
        missing = [seen.missing[part] for part in check.needs if part in seen.missing]
        for verdict in check.looks(seen) if not missing else map(Unknown, missing[:1]):
            if isinstance(verdict, Unknown):
                not_checked.append(NotChecked(check.name, verdict.why))
            else:
                runbook = f"docs/{check.page}"
                findings.append(Finding(check.name, check.severity, verdict.subject, verdict.sentence, runbook))
    order = list(Severity)
    return Report(sorted(findings, key=lambda finding: order.index(finding.severity)), not_checked)
