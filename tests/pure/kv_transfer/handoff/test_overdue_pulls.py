"""Pulls that are given up at their deadline, and the blocks that are kept from everybody until they are over."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from kv_transfer.handoff.overdue_pulls import OverduePulls, PullReport, Quarantine


@dataclass
class Nixl:
    """Transfers by handle; those in `running` are not over."""

    running: set[int] = field(default_factory=set)

    def take_ended(self, transfers: dict[str, list[Any]]) -> set[str]:
        ended = set()
        for name, handles in list(transfers.items()):
            transfers[name] = [handle for handle in handles if handle in self.running]
            if not transfers[name]:
                del transfers[name]
                ended.add(name)
        return ended


@dataclass
class Pool:
    references: dict[str, int] = field(default_factory=dict)

    def touch(self, blocks: list[str]) -> None:
        for block in blocks:
            self.references[block] = self.references.get(block, 0) + 1

    def free_blocks(self, blocks: Any) -> None:
        for block in blocks:
            self.references[block] -= 1


def report(given_up: str = "", over: str = "") -> PullReport:
    made = PullReport()
    made.given_up.update(given_up.split())
    made.over.update(over.split())
    return made


@pytest.fixture
def nixl() -> Nixl:
    return Nixl()


@pytest.fixture
def pulls(nixl: Nixl) -> OverduePulls:
    return OverduePulls(nixl.take_ended)


@pytest.fixture
def pool() -> Pool:
    return Pool()


def test_a_pull_is_told_of_once_when_it_is_given_up_and_once_when_it_is_over(pulls: OverduePulls, nixl: Nixl) -> None:
    nixl.running = {1, 2}
    pulls.give_up("r", [1, 2])
    pulls.poll()
    assert pulls.report() == report(given_up="r")
    nixl.running = {2}
    pulls.poll()
    assert not pulls.report()
    nixl.running = set()
    pulls.poll()
    assert pulls.report() == report(over="r")
    pulls.poll()
    assert not pulls.report()
    assert len(pulls) == 0


def test_one_that_has_not_begun_is_over_at_once(pulls: OverduePulls) -> None:
    pulls.give_up("r", [])
    pulls.poll()
    assert pulls.report() == report(given_up="r", over="r")


def test_blocks_are_held_until_the_pull_is_over_in_every_worker(pool: Pool) -> None:
    quarantine = Quarantine(pool)
    quarantine.take_in(report(given_up="r"), lambda name: ["a", "b"])
    quarantine.take_in(report(given_up="r"), lambda name: ["a", "b"])
    assert pool.references == {"a": 1, "b": 1}
    assert len(quarantine) == 2
    quarantine.take_in(report(over="r"), lambda name: [])
    assert pool.references == {"a": 1, "b": 1}
    quarantine.take_in(report(over="r"), lambda name: [])
    assert pool.references == {"a": 0, "b": 0}
    assert not quarantine
    assert quarantine.pulls == 1


def test_that_a_pull_is_over_may_be_heard_first(pool: Pool) -> None:
    """That it was given up comes with the end of a step, what is looked for before the next one sooner."""
    quarantine = Quarantine(pool)
    quarantine.take_in(report(over="r"), lambda name: [])
    quarantine.take_in(report(given_up="s"), lambda name: [name])
    assert pool.references == {"s": 1}
    quarantine.take_in(report(given_up="r"), lambda name: [name])
    assert pool.references == {"r": 0, "s": 1}
    assert (quarantine.blocks, quarantine.pulls) == (["s"], 2)


def test_pulls_are_told_apart(pool: Pool) -> None:
    quarantine = Quarantine(pool)
    quarantine.take_in(report(given_up="r s"), lambda name: [name])
    quarantine.take_in(report(over="s"), lambda name: [])
    assert pool.references == {"r": 1, "s": 0}
    assert quarantine.blocks == ["r"]


def test_reports_of_workers_add_up() -> None:
    both = report(given_up="r") + report(given_up="r", over="s")
    assert both == report(given_up="r r", over="s")
