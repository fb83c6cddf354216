"""Last outputs that wait for the checksums of what they lease."""

import asyncio
from typing import Any

import pytest

from cluster_core.clock import UnixMs
from cluster_core.engine_jobs import EngineJob, EngineOutput, FinishReason, KvLease, SamplingSpec
from kv_transfer.handoff.content_check import CHECKSUMS_PARAM
from kv_transfer.handoff.lease_params import decode_params
from worker_runtime.held_leases import _MOST_STEPS, HeldLeases
from worker_runtime.job_stream import JobStream

LEASE = KvLease("r", b"{}", UnixMs(5))
LAST = EngineOutput((1,), "a", finish_reason=FinishReason.LENGTH, lease=LEASE)
ASKED = {"remote_host": "h", CHECKSUMS_PARAM: True}
LEASED = ("r-internal", "s-internal")


def stream(name: str = "r") -> JobStream:
    return JobStream(EngineJob(name, (1,), SamplingSpec()), asyncio.Queue(), internal_id=f"{name}-internal")


@pytest.mark.parametrize(
    ("output", "params"),
    [
        (EngineOutput((1,), "a"), None),
        (EngineOutput((1,), "a", finish_reason=FinishReason.STOP), ASKED),
        (LAST, {**ASKED, CHECKSUMS_PARAM: False}),
    ],
)
def test_what_is_not_checked_does_not_wait(output: EngineOutput, params: dict[str, Any] | None) -> None:
    forgotten: list[str] = []
    held = HeldLeases(lambda name: None, forgotten.append, lambda: LEASED)
    assert not held.holds(stream(), output, params)
    assert held.ready() == []


def test_a_lease_goes_out_with_its_checksums_once_they_are_there() -> None:
    known: dict[str, Any] = {}
    forgotten: list[str] = []
    held = HeldLeases(lambda name: known.pop(name, None), forgotten.append, lambda: LEASED)
    one, other = stream("r"), stream("s")
    assert held.holds(one, LAST, ASKED) and held.holds(other, LAST, ASKED)
    assert held.ready() == []
    known["s-internal"] = {0: [7]}
    ((ready, output),) = held.ready()
    assert ready is other
    assert output.lease is not None
    assert (output.lease.lease_id, output.lease.deadline_unix_ms) == ("r", 5)
    params = decode_params(output.lease.connector_params)
    assert (params["remote_host"], params[CHECKSUMS_PARAM]) == ("h", {"0": [7]})
    assert (output.token_ids, output.finish_reason) == ((1,), FinishReason.LENGTH)
    assert held.take_all() == [one]
    assert held.take_all() == []


def test_a_lease_whose_checksums_do_not_come_goes_out_unchecked() -> None:
    forgotten: list[str] = []
    held = HeldLeases(lambda name: None, forgotten.append, lambda: LEASED)
    held.holds(stream(), LAST, ASKED)
    steps = [held.ready() for _ in range(_MOST_STEPS)]
    assert [len(each) for each in steps] == [0] * (_MOST_STEPS - 1) + [1]
    ((_, output),) = steps[-1]
    assert output.lease is not None
    assert decode_params(output.lease.connector_params)[CHECKSUMS_PARAM] is None
    assert forgotten == ["r-internal"]


def test_a_lease_that_has_ended_goes_out_with_the_step_that_ends_it_which_may_be_the_last_one() -> None:
    forgotten: list[str] = []
    leased = set(LEASED)
    held = HeldLeases(lambda name: None, forgotten.append, lambda: leased)
    one, other = stream("r"), stream("s")
    assert held.holds(one, LAST, ASKED) and held.holds(other, LAST, ASKED)
    assert held.ready() == []
    leased.remove("r-internal")
    assert [each for each, _ in held.ready()] == [one]
    assert forgotten == ["r-internal"]
    assert held.take_all() == [other]
