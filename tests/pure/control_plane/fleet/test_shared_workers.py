"""Workers that do both, as placement finds them among the members."""

from rachis.v1 import worker_pb2 as wire

from control_plane.fleet.loads import Work
from control_plane.fleet.membership import Membership
from tests.pure.control_plane.fleet.test_membership import record


def test_workers_that_do_both_are_candidates_of_either_pool_with_one_load() -> None:
    membership = Membership()
    membership.replace([record(f"shared-{number}", pool=wire.POOL_SHARED) for number in range(2)])
    prefill, decode = (membership.usable(pool) for pool in (wire.POOL_PREFILL, wire.POOL_DECODE))
    assert prefill == decode and [worker.worker_id for worker in decode] == ["shared-0", "shared-1"]
    membership.acquire(decode[0], Work(10), 0.0)
    for pool in (wire.POOL_PREFILL, wire.POOL_DECODE):
        assert membership.candidates(pool, 0.0).in_flight_tokens.tolist() == [10, 0]
    membership.suspect(prefill[0])
    assert membership.usable(wire.POOL_DECODE) == decode[1:]
