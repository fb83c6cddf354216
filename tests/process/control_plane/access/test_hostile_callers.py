"""Strangers at the doors, from pinned seeds: nobody hangs, everybody is told what they should be, and nothing leaks.

More of them with RACHIS_WIDE=1.
"""

import logging
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from cluster_wire import members
from cluster_wire.secret import Secret
from control_plane.access.api_keys import ApiKey
from control_plane.access.client_certificates import ClientCertificates
from control_plane.access.logins import Logins
from control_plane.access.roles import Identity
from tests.examples import seeds
from tests.fakes.cluster import DECODE, PREFILL
from tests.fakes.wiretap import Wiretap, tapped
from tests.planting import planted
from tests.process.control_plane.access.certified_world import certified_cluster
from tests.process.control_plane.access.conftest import made_keys
from tests.process.control_plane.access.hostile_callers import HostileCallers, Told

SEEDS = seeds(50, few=2)
MOVES = 24

Made = tuple[Path, dict[str, str]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return made_keys(tmp_path_factory.mktemp("keys"))


async def played(
    folder: Path, made: Made, seed: int, caplog: pytest.LogCaptureFixture, moves: int = MOVES, sought: str = ""
) -> tuple[list[Told], list[str]]:
    """What was wrong, and what has leaked. Two workers are of somebody else, and reached first; two of the service's
    own come next, and serve."""
    taps: list[Wiretap] = []
    async with AsyncExitStack() as stack:
        world = await stack.enter_async_context(certified_cluster(folder, made))

        async def through(address: str) -> str:
            tap, there = await stack.enter_async_context(tapped(address))
            taps.append(tap)
            return there

        for pool, secret in ((PREFILL, Secret(b"x" * 32)), (DECODE, None)):
            await world.keyed.cluster.add(pool, f"a-{seed}-{pool}", secret=secret, reached_at=through)
            await world.keyed.cluster.add(pool, f"b-{seed}-{pool}", reached_at=through, lease_s=60.0)
        callers = HostileCallers(world, folder, seed)
        with caplog.at_level(logging.DEBUG):
            wrong = await callers.play(moves, sought)
        written = [caplog.text.encode(), world.keyed.audit_file.read_bytes(), *(bytes(tap.passed) for tap in taps)]
        assert any(tap.passed for tap in taps)
        return wrong, [kept for kept in callers.kept for each in written if kept.encode() in each]


@pytest.mark.parametrize("seed", SEEDS)
async def test_nobody_hangs_or_is_taken_for_another_and_nothing_leaks(
    seed: int, tmp_path: Path, made: Made, caplog: pytest.LogCaptureFixture
) -> None:
    assert await played(tmp_path, made, seed, caplog) == ([], [])


async def _takes_any_secret(self: Logins, key: ApiKey, secret: str, digest: bytes) -> Identity:
    # A bug has no port to come in by.
    self._known[digest] = key.key_id, key.secrets[0]
    return key.identity


async def test_bugs_that_are_planted_are_seen(
    tmp_path: Path, made: Made, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    bugs = {
        "a forged certificate": (members, "_is_member", lambda *_: True),
        "a stolen key": (ClientCertificates, "is_own", lambda *_: True),
        "a wrong key": (Logins, "_look", _takes_any_secret),
    }
    for number, (move, bug) in enumerate(bugs.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        with monkeypatch.context() as patch:
            planted(patch, *bug)
            if move == "a forged certificate":
                # Two lines of defence: each alone holds.
                planted(patch, ClientCertificates, "is_own", lambda *_: True)
            wrong, _ = await played(folder, made, 0, caplog, moves=40, sought=move)
        assert move in {each.move for each in wrong}, move


async def test_what_is_logged_by_mistake_is_seen(
    tmp_path: Path, made: Made, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Logins.login

    async def says_so(self: Logins, given: str) -> object:
        logging.getLogger(__name__).info("who is %s?", given)
        return await right(self, given)

    planted(monkeypatch, Logins, "login", says_so)
    wrong, leaked = await played(tmp_path, made, 0, caplog, moves=8)
    assert not wrong and leaked
