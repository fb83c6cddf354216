"""Where a router sends its requests: what it knows of prefixes, what it predicts, and what it remembers for people."""

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire

from cluster_configs.schema import PlacementSection
from cluster_core.ids import RequestId
from control_plane.fleet.membership import Membership
from control_plane.model.job import Job
from control_plane.model.lifecycle import RequestLifecycle
from control_plane.model.prefix_scope import PrefixScope
from control_plane.placement.disaggregation import Reason
from control_plane.placement.index_ports import IndexPorts
from control_plane.placement.placer import Flight, Placement, Placer
from control_plane.prefix_index.index import Matches, PrefixIndex
from kv_transfer.claims.claims import ClaimChange
from kv_transfer.claims.prefix_chunks import Keys

PREFILL, DECODE = wire.POOL_PREFILL, wire.POOL_DECODE
CHUNK = 16
POOLS = {"p0": PREFILL, "p1": PREFILL, "d0": DECODE, "d1": DECODE}
COSTS = wire.WorkerCosts(
    prefill_s_per_token=1e-3, load_s_per_token=1e-4, decode_step_s=0.01, pull_s=0.05, pull_s_per_token=1e-5
)


class World:
    """A placer over two workers in each pool, on a clock that tests move."""

    def __init__(self, **settings: Any) -> None:
        self.now_s = 100.0
        self.membership = Membership()
        self.records = {name: _record(name, 1) for name in POOLS}
        self.membership.replace(self.records.values())
        self.index = PrefixIndex(4096, 100.0)
        for name in POOLS:
            self.index.join(name, 1)
        self.stale = False
        self.accesses: list[Keys] = []
        self.rng = random.Random(0)
        ports = IndexPorts(self.index, lambda: self.stale, lambda: self.now_s, self.accesses.append)
        self.placer = Placer(
            self.membership, ports, PlacementSection(**{"disaggregation": "always", **settings}),
            service_id="s", chunk_tokens=CHUNK, rng=self.rng, now_s=lambda: self.now_s,
        )  # fmt: skip
        self.jobs = 0

    def job(self, tokens: list[int], *, salt: str = "", changes: bool = False) -> Job:
        self.jobs += 1
        name = RequestId(f"r{self.jobs}")
        return Job(
            name, tokens, generation.SamplingParams(max_tokens=8), RequestLifecycle(name), 0.0, 1e9,
            scope=PrefixScope(salt), prompt_changes=changes,
        )  # fmt: skip

    def place(self, tokens: list[int], pool: Any = PREFILL, **job: Any) -> Placement:
        placement = self.placer.place(self.job(tokens, **job), pool)
        assert placement is not None
        return placement

    def reason(self, tokens: list[int], *, is_whole: bool = True) -> str:
        """Why a request is, or is not, disaggregated."""
        job = self.job(tokens)
        self.placer.route(job, is_whole=is_whole)
        explanation = self.placer.log.explanation(job.request_id)
        assert explanation is not None
        return explanation.reason

    @contextmanager
    def in_flight(self, placement: Placement) -> Iterator[Flight]:
        flight = self.placer.begin(placement)
        try:
            yield flight
        finally:
            flight.end()

    def holds(self, worker: str, tokens: list[int], *, salt: str = "", host: bool = False) -> None:
        keys = self.placer.packed(tokens, PrefixScope(salt)).keys
        self.index.apply(worker, ClaimChange(host_stored=keys) if host else ClaimChange(device_stored=keys))

    def shared(self, tokens: list[int]) -> bool:
        """Whether a decode worker is seen to run a request with the same beginning."""
        _, decode = self.placer.supposed(self.placer.packed(tokens, PrefixScope()), 8).choices
        return bool(decode.view.shared.any())

    def winners(self, tokens: list[int], pool: Any = PREFILL, *, times: int = 12, **job: Any) -> set[str]:
        return {self.place(tokens, pool, **job).worker.worker_id for _ in range(times)}


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.membership.check_invariants()


def prompt(seed: int, tokens: int = 10 * CHUNK) -> list[int]:
    return random.Random(seed).choices(range(1000), k=tokens)


def test_a_prompt_goes_where_it_is_cached_in_either_tier(world: World) -> None:
    world.holds("p1", prompt(1))
    world.holds("p0", prompt(2), host=True)
    assert world.winners(prompt(1)) == {"p1"}
    assert world.winners(prompt(2)) == {"p0"}
    assert world.winners(prompt(3)) == {"p0", "p1"}, "nobody has it: equals"


def test_what_is_expected_of_a_placement(world: World) -> None:
    world.holds("p1", prompt(1)[: 6 * CHUNK])
    world.holds("p1", prompt(1)[: 8 * CHUNK], host=True)
    work = world.place(prompt(1)).work
    assert (work.tokens, work.uncomputed_tokens) == (160, 32)
    assert work.expected_s == pytest.approx(32e-3 + 32e-4)


def test_tenants_do_not_find_each_other_s_prefixes(world: World) -> None:
    world.holds("p1", prompt(1), salt="one")
    assert world.winners(prompt(1), salt="one") == {"p1"}
    for salt in ("two", ""):
        found = world.place(prompt(1), salt=salt)
        assert found.work.uncomputed_tokens == 160, "not even its cost differs"
        assert world.winners(prompt(1), salt=salt) == {"p0", "p1"}


def test_siblings_in_a_burst_follow_the_first_one_before_any_event(world: World) -> None:
    first = world.place(prompt(1))
    with world.in_flight(first):
        sibling = world.place([*prompt(1), *prompt(9, CHUNK)])
        assert sibling.worker == first.worker
        assert sibling.work.uncomputed_tokens == CHUNK
    world.now_s += 4.0
    assert world.winners(prompt(1)) == {first.worker.worker_id}
    world.now_s += 2.0
    assert world.winners(prompt(1)) == {"p0", "p1"}, "nobody has told of it: it was never kept"


def test_a_queue_turns_even_a_hit_away(world: World) -> None:
    world.holds("p1", prompt(1))
    with ExitStack() as busy:
        while world.place(prompt(1)).worker.worker_id == "p1":
            busy.enter_context(world.in_flight(world.place(prompt(1))))
            assert world.jobs < 5000
        busy.enter_context(world.in_flight(world.place(prompt(1))))
    assert world.jobs > 100, "a hit costs a 160th of computing it, which weighs threefold"


def test_claims_of_an_earlier_start_are_not_believed(world: World) -> None:
    world.holds("p1", prompt(1))
    world.records["p1"] = _record("p1", 2)
    world.membership.replace(world.records.values())
    assert world.winners(prompt(1)) == {"p0", "p1"}
    world.index.join("p1", 2)
    world.holds("p1", prompt(1))
    assert world.winners(prompt(1)) == {"p1"}


def test_a_stale_index_is_not_asked(world: World) -> None:
    world.holds("p1", prompt(1))
    world.stale = True
    assert world.winners(prompt(1), times=20) == {"p0", "p1"}
    with world.in_flight(world.place(prompt(2))):
        pass
    assert world.placer.counts.load_only == 21
    world.stale = False
    assert world.winners(prompt(1)) == {"p1"}
    assert world.placer.counts.load_only == 21


@pytest.mark.parametrize(("apart", "workers"), [(True, {"p0"}), (False, {"p0", "p1"})])
def test_long_prompts_keep_apart_where_that_is_asked_for(apart: bool, workers: set[str]) -> None:
    world = World(long_prompts_apart=apart)
    for seed in range(64):
        world.place(prompt(seed, CHUNK))
    for seed in range(64):
        world.place(prompt(seed, 20 * CHUNK))
    assert world.winners(prompt(99, 30 * CHUNK)) == workers


def test_decodes_of_a_prefix_gather(world: World) -> None:
    first = world.place(prompt(1), DECODE)
    with world.in_flight(first):
        assert world.winners([*prompt(1), *prompt(7)], DECODE) == {first.worker.worker_id}
        assert world.place(prompt(2), DECODE).worker != first.worker
    assert world.place([*prompt(1), *prompt(7)], DECODE) and not world.shared(prompt(1))


def test_a_session_s_prompt_is_looked_at_as_it_stands(world: World) -> None:
    """An update may leave it as long as it was."""
    world.holds("p1", prompt(1))
    world.holds("p0", prompt(2))
    job = world.job(prompt(1), changes=True)
    first = world.placer.place(job, PREFILL)
    job.token_ids[:] = prompt(2)
    second = world.placer.place(job, PREFILL)
    assert first is not None and second is not None
    assert (first.worker.worker_id, second.worker.worker_id) == ("p1", "p0")


@pytest.mark.parametrize("whole", [None, 4 * CHUNK, 100 * CHUNK])
def test_sessions_are_spread_though_one_worker_is_a_little_quicker(world: World, whole: int | None) -> None:
    """Opened so long apart that what has come is computed. whole: what a session brought before; None: not known."""
    world.records["p1"].costs.prefill_s_per_token *= 1.02
    world.membership.replace(world.records.values())
    if whole is not None:
        world.placer.keep(world.job(prompt(99, whole), changes=True))
    where = Counter[str]()
    with ExitStack() as open_sessions:
        for seed in range(20):
            placement = world.place(prompt(seed, 2 * CHUNK), changes=True)
            where[placement.worker.worker_id] += 1
            open_sessions.enter_context(world.in_flight(placement))
            world.now_s += 30.0
        assert where == {"p0": 10, "p1": 10}
        further = world.in_flight(world.place(prompt(50, 2 * CHUNK), changes=True))
        open_sessions.enter_context(further)
        world.now_s += 30.0
        assert world.winners(prompt(51, 2 * CHUNK), changes=True) == {"p1"}, "one fewer is open there"
        assert world.winners(prompt(51, 2 * CHUNK)) == {"p0"}, "engines compute whole prompts first"


def test_a_slow_worker_gets_as_many_sessions_less(world: World) -> None:
    world.records["p1"].costs.prefill_s_per_token *= 4
    world.membership.replace(world.records.values())
    world.placer.keep(world.job(prompt(99, 100 * CHUNK), changes=True))
    where = Counter[str]()
    with ExitStack() as open_sessions:
        for seed in range(40):
            placement = world.place(prompt(seed, CHUNK), changes=True)
            where[placement.worker.worker_id] += 1
            open_sessions.enter_context(world.in_flight(placement))
            world.now_s += 30.0
    assert where == {"p0": 32, "p1": 8}


def test_that_a_worker_has_computed_a_session_makes_the_next_one_no_shorter(world: World) -> None:
    """Its prompt is whole when it has been computed: where that was it is cached by then."""
    long = prompt(99, 200 * CHUNK)
    job = world.job(long, changes=True)
    world.holds("p0", long)
    world.placer.keep(job)
    where = Counter[str]()
    with ExitStack() as running:
        running.enter_context(world.in_flight(world.place(prompt(1, 200 * CHUNK))))
        for seed in range(2, 42):
            placement = world.place(prompt(seed, CHUNK), changes=True)
            where[placement.worker.worker_id] += 1
            running.enter_context(world.in_flight(placement))
    assert sorted(where.values()) == [20, 20], "3.2 s a session"


def test_a_session_goes_where_whole_prompts_do_not_wait_if_sessions_bring_less(world: World) -> None:
    world.placer.keep(world.job(prompt(99, 10 * CHUNK), changes=True))
    whole = world.place(prompt(1, 200 * CHUNK))
    where = []
    with world.in_flight(whole), ExitStack() as open_sessions:
        for seed in range(2, 22):
            placement = world.place(prompt(seed, CHUNK), changes=True)
            where.append(placement.worker.worker_id)
            open_sessions.enter_context(world.in_flight(placement))
    # It takes 3.2 s, and what sessions bring 0.16 s each.
    assert whole.worker.worker_id not in where[:15] and whole.worker.worker_id in where


def test_a_request_counts_as_one_access_with_its_whole_prompt(world: World) -> None:
    job = world.job(prompt(1))
    world.placer.place(job, PREFILL)
    world.placer.keep(job)
    world.placer.keep(world.job([1, 2, 3]))
    assert [len(keys) for keys in world.accesses] == [10], "what fills no chunk is in no index"


# Disaggregation.


def test_a_short_remainder_is_prefilled_where_it_is_decoded() -> None:
    """160 tokens cost 160 ms on either side, and 52 ms to be pulled; who decodes meanwhile would wait as long."""
    world = World(disaggregation="conditional")
    world.holds("d1", prompt(1))
    with ExitStack() as decoding:
        for seed in range(2, 6):
            decoding.enter_context(world.in_flight(world.place(prompt(seed), DECODE)))
        reasons = [
            world.reason(prompt(1)),
            world.reason(prompt(9)),
            world.reason(prompt(1), is_whole=False),
        ]
    assert reasons == [Reason.SHORT_REMAINDER, Reason.REMOTE_SOONER, Reason.SESSION]
    assert world.placer.counts.reasons == dict.fromkeys(reasons, 1)


def test_a_slow_or_missing_prefill_pool_is_gone_around() -> None:
    world = World(disaggregation="conditional", local_prefill_tokens=0)
    assert world.reason(prompt(1)) is Reason.LONG_REMAINDER
    with ExitStack() as busy:
        for seed in range(10):
            busy.enter_context(world.in_flight(world.place(prompt(seed + 2))))
        assert world.reason(prompt(1)) is Reason.PREFILL_SLOW
    for pool, reason in ((PREFILL, Reason.PREFILL_DOWN), (DECODE, Reason.DECODE_DOWN)):
        world.membership.replace([each for each in world.records.values() if each.pool != pool])
        assert world.reason(prompt(1)) is reason


def test_a_request_that_is_routed_is_decided_on_once_for_each_pool() -> None:
    """The prefill worker that was found in comparing the two ways is the one that is placed on."""
    world = World(disaggregation="conditional", local_prefill_tokens=0)
    lookups: list[int] = []
    lookup = world.index.lookup

    def counted(keys: Keys, now_s: float = 0.0) -> Matches:
        lookups.append(len(keys))
        return lookup(keys, now_s)

    # How often the index is asked is visible nowhere else.
    world.index.lookup = counted  # type: ignore[method-assign]
    for seed in range(20):
        job = world.job(prompt(seed))
        placement = world.placer.route(job, is_whole=True)
        explanation = world.placer.log.explanation(job.request_id)
        assert placement is not None and explanation is not None
        (choice,) = explanation.choices
        assert choice.worker == placement.worker
    assert lookups == [10, 10] * 20


def test_a_worker_that_starts_again_is_looked_for_under_its_new_generation(world: World) -> None:
    world.holds("p1", prompt(1))
    assert world.winners(prompt(1)) == {"p1"}
    world.index.join("p1", 2)
    assert world.winners(prompt(1)) == {"p0", "p1"}, "claims of another generation say nothing"
    world.index.join("p1", 1)
    world.holds("p1", prompt(1))
    assert world.winners(prompt(1)) == {"p1"}


def test_always_means_always(world: World) -> None:
    world.holds("d1", prompt(1))
    assert world.reason(prompt(1)) is Reason.ALWAYS


# What is remembered for people.


def test_decisions_are_remembered_by_request(world: World) -> None:
    world.holds("p1", prompt(1))
    job = world.job(prompt(1))
    world.placer.route(job, is_whole=True)
    world.placer.place(job, PREFILL, frozenset({("p1", 1)}))
    world.placer.place(job, DECODE)
    explanation = world.placer.log.explanation(job.request_id)
    assert explanation is not None and explanation.reason is Reason.ALWAYS
    assert [(choice.pool, choice.worker is not None) for choice in explanation.choices] == [
        (PREFILL, True),
        (PREFILL, True),
        (DECODE, True),
    ]
    assert explanation.choices[1].decision.passed.tolist() == [True, False]
    assert explanation.choices[1].view.device.tolist() == [0, 160]
    for _ in range(1000):
        world.place(prompt(1))
    assert world.placer.log.explanation(job.request_id) is None and len(world.placer.log.request_ids()) == 1000


def test_what_is_remembered_takes_no_more_memory_than_it_may() -> None:
    world = World(explanations_mib=1, recent_prompts_mib=1)
    for variant in range(600):
        world.place(prompt(variant) * 5)
    recent, explanations, late = world.placer.memory()
    assert late.used_bytes <= late.limit_bytes
    assert 0.99 * recent.limit_bytes < recent.used_bytes <= recent.limit_bytes
    assert 0.99 * explanations.limit_bytes < explanations.used_bytes <= explanations.limit_bytes
    assert len(world.placer.log.request_ids()) < 600
    assert world.placer.log.explanation("r600") is not None

    forgetful = World(explanations_mib=0, recent_prompts_mib=0)
    forgetful.place(prompt(1))
    assert [use.used_bytes for use in forgetful.placer.memory()][:2] == [0, 0]


def _record(name: str, number: int) -> wire.WorkerRegistration:
    return wire.WorkerRegistration(
        worker_id=name, generation=number, pool=POOLS[name], state=wire.WORKER_STATE_READY, block_size_tokens=CHUNK,
        max_running_requests=64, load=wire.WorkerLoad(free_blocks=1000, total_blocks=1000), costs=COSTS,
    )  # fmt: skip
