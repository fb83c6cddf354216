"""Prompts beside running decodes: how much of them a step computes, and who has what was pulled goes first."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from vllm.v1.request import Request, RequestStatus

from cluster_core.engine_reports import EngineCosts
from decode_worker.chunk_bounding import ChunkBounding
from decode_worker.step_bound import Limit, spare_s
from tests.campaign.fuzz.kv_checking_runner import LOAD_STEPS, expected_tokens
from tests.campaign.fuzz.simulated_engine import BLOCK_SIZE, SimulatedEngine, SteppedClock
from tests.integration.decode_scheduler.requests import GREEDY, MakeEngine, status, text, until
from tests.planting import planted

pytestmark = pytest.mark.integration

PROTOCOLS = [(False, 1), (True, 2)]
# 10 ms for a step, and 1 ms for each token of a prompt.
COSTS = EngineCosts(decode_step_s=0.010, prefill_s_per_token=0.001)
TPOT_S = 0.050
# Of 47.5 ms, 95% of the objective.
BOUND = 37
DECODES = 400


def decoding(engine: SimulatedEngine, name: str = "decoder", priority: int = 0) -> None:
    """A request that has begun to answer."""
    engine.scheduler.use_costs(lambda: COSTS)
    engine.add(name, text(name, 1), DECODES, priority=priority)
    until(engine, lambda: bool(engine.answers.get(name)))
    engine.outputs.clear()


def chunks(engine: SimulatedEngine, name: str) -> list[int]:
    """How many of its tokens each step has computed that computed any."""
    steps = [output.num_scheduled_tokens for output in engine.outputs]
    return [step[name] for step in steps if name in step]


@pytest.mark.parametrize(("v2", "depth"), PROTOCOLS)
def test_beside_decodes_a_prompt_is_computed_in_chunks_that_their_objective_allows(
    make_engine: MakeEngine, v2: bool, depth: int
) -> None:
    engine = make_engine(v2=v2, depth=depth, decode=GREEDY, tpot_s=TPOT_S)
    decoding(engine)
    engine.add("long", text("long", 20), 2)
    engine.add("longer", text("longer", 20), 2)
    until(engine, lambda: bool(engine.answers.get("longer")))

    prompts = [
        sum(tokens for name, tokens in output.num_scheduled_tokens.items() if name != "decoder" and tokens > 1)
        for output in engine.outputs
    ]
    assert max(prompts) == BOUND
    assert sum(each == BOUND for each in prompts) >= 2 * 20 * BLOCK_SIZE // BOUND - 2
    assert all(output.num_scheduled_tokens.get("decoder") == 1 for output in engine.outputs), "a decode waits"
    assert engine.scheduler.chunks[Limit.TPOT] == sum(each == BOUND for each in prompts)
    until(engine, lambda: len(engine.answers["long"]) == 2)
    assert engine.answers["long"] == expected_tokens(text("long", 20), 2)


@pytest.mark.parametrize(
    ("priorities", "best_effort_tpot_s", "most"),
    [
        ([1], 0.100, 85),
        ([1, 0], 0.100, BOUND),
        ([1], None, BOUND),
        ([1], 0.0, 20 * BLOCK_SIZE),
        ([1, 0], 0.0, BOUND),
    ],
)
def test_a_step_keeps_the_strictest_objective_of_those_who_decode_in_it(
    make_engine: MakeEngine, priorities: list[int], best_effort_tpot_s: float | None, most: int
) -> None:
    engine = make_engine(decode=GREEDY, tpot_s=TPOT_S, best_effort_tpot_s=best_effort_tpot_s)
    for number, priority in enumerate(priorities):
        decoding(engine, f"decoder {number}", priority)
    engine.add("long", text("long", 20), 2)
    until(engine, lambda: bool(engine.answers.get("long")))

    assert max(chunks(engine, "long")) == most


def beside_ten_of_best_effort(make_engine: MakeEngine, clock: SteppedClock) -> int:
    """How much is computed of a late prompt in a step of one that has nothing to spare, and ten that have minutes."""
    engine = make_engine(decode=GREEDY, tpot_s=TPOT_S, best_effort_tpot_s=1000 * TPOT_S, ttft_s=0.01, places=16)
    for number in range(10):
        decoding(engine, f"best effort {number}", priority=1)
    decoding(engine, "interactive")
    # Its first token has been seen.
    engine.turn()
    clock.now_s += 20.0
    engine.add("late", text("late", 20), 2)
    engine.turn()
    engine.turn()
    return max(chunks(engine, "late"))


def test_those_of_best_effort_do_not_outvote_the_one_that_has_nothing_to_spare(
    make_engine: MakeEngine, clock: SteppedClock
) -> None:
    """Of eleven together one has no say."""
    assert beside_ten_of_best_effort(make_engine, clock) <= BOUND


def test_what_one_class_can_spare_that_is_taken_from_another_is_noticed(
    make_engine: MakeEngine, clock: SteppedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_all(self: ChunkBounding, answering: Iterable[Any], now_s: float) -> float:
        each = list(answering)
        had = zip(each, self._progress(each, now_s), strict=True)
        return spare_s(tokens * self._tpot_s(request) - took_s for request, (tokens, took_s) in had)

    planted(monkeypatch, ChunkBounding, "_spare_s", of_all)
    assert beside_ten_of_best_effort(make_engine, clock) > BOUND


def test_a_step_took_what_was_computed_in_it(make_engine: MakeEngine) -> None:
    """A prompt that is pulled beside it has tokens, too, and none of them is computed."""
    engine = make_engine(decode=GREEDY, tpot_s=TPOT_S, best_effort_tpot_s=0.0)
    decoding(engine, priority=1)
    engine.remote_tokens["pulled"] = 10 * BLOCK_SIZE
    engine.add("pulled", text("pulled", 10), 3, transfer={"do_remote_prefill": True})
    engine.add("prompt", text("prompt", 1), 2)
    engine.turn()
    assert chunks(engine, "prompt") == [BLOCK_SIZE] and not chunks(engine, "pulled")
    # What the next step is planned by, if this one still runs.
    assert engine.scheduler._last_step_s == pytest.approx(0.010 + 0.001 * BLOCK_SIZE)
    engine.drain()


def test_a_step_of_prompts_alone_took_as_long_as_they_take(make_engine: MakeEngine) -> None:
    """Another engine may have answered one of them: what it has to spare afterwards is less by that step."""
    engine = make_engine(decode=GREEDY, tpot_s=TPOT_S)
    engine.scheduler.use_costs(lambda: COSTS)
    engine.add("prompt", text("prompt", 10), 2)
    engine.turn()
    # What a step took is seen by nobody else, but in what the next one computes.
    assert engine.scheduler._last_step_s == pytest.approx(0.010 + 0.001 * 10 * BLOCK_SIZE)
    engine.drain()


@pytest.mark.parametrize("fields", [{"tpot_s": TPOT_S}, {}], ids=["nothing decodes", "no objective"])
def test_else_a_prompt_takes_the_whole_step(make_engine: MakeEngine, fields: dict[str, float]) -> None:
    engine = make_engine(decode=GREEDY, **fields)
    engine.scheduler.use_costs(lambda: COSTS)
    if not fields:
        decoding(engine)
    engine.add("long", text("long", 20), 2)
    engine.turn()

    assert chunks(engine, "long") == [20 * BLOCK_SIZE]


@pytest.mark.parametrize(("spare_s", "second"), [(1.0, 20 * BLOCK_SIZE - BOUND), (0.1, BOUND + 100), (0.0, BOUND)])
def test_a_prompt_whose_first_token_would_be_late_takes_what_it_needs_of_what_the_decode_has_to_spare(
    make_engine: MakeEngine, clock: SteppedClock, spare_s: float, second: int
) -> None:
    engine = make_engine(decode=GREEDY, tpot_s=TPOT_S, ttft_s=5.0)
    decoding(engine)
    began_s = clock.now_s
    # Each token spares 40 of its 50 ms.
    until(engine, lambda: len(engine.answers["decoder"]) == 200)
    engine.outputs.clear()
    engine.add("long", text("long", 20), 2)
    engine.turn()
    clock.advance(began_s + 200 * TPOT_S - spare_s - clock.now_s)
    engine.turn()

    assert chunks(engine, "long") == [BOUND, second]
    assert engine.scheduler.chunks[Limit.TTFT] == (second > BOUND)
    until(engine, lambda: len(engine.answers.get("long", ())) == 2)
    assert engine.answers["long"] == expected_tokens(text("long", 20), 2)


@pytest.mark.parametrize(("priority", "yields"), [(0, True), (1, False)])
def test_a_prompt_of_best_effort_is_late_by_its_own_objective(
    make_engine: MakeEngine, priority: int, yields: bool
) -> None:
    engine = make_engine(decode=GREEDY, tpot_s=TPOT_S, ttft_s=0.1, best_effort_ttft_s=60.0)
    decoding(engine)
    until(engine, lambda: len(engine.answers["decoder"]) == 200)
    engine.outputs.clear()
    engine.add("long", text("long", 20), 2, priority=priority)
    engine.turn()

    assert (chunks(engine, "long")[0] > BOUND) is yields


def test_a_prompt_that_the_cache_has_is_not_late_for_what_it_need_not_compute(
    make_engine: MakeEngine, clock: SteppedClock
) -> None:
    engine = make_engine(decode=GREEDY, tpot_s=TPOT_S, ttft_s=0.3)
    engine.add("before", text("long", 20), 1)
    engine.drain()
    decoding(engine)
    engine.add("long", text("long", 20) + text("tail", 6), 2)
    engine.turn()

    assert chunks(engine, "long") == [BOUND]


def test_a_prefix_that_was_evicted_while_its_prompt_waited_is_computed_in_chunks_as_any_other(
    make_engine: MakeEngine,
) -> None:
    in_order = replace(GREEDY, policy="fcfs")
    engine = make_engine(decode=in_order, tpot_s=TPOT_S, ttft_s=1000.0, blocks=80, places=2, tiers=False)
    engine.add("before", text("long", 20), 1)
    engine.drain()
    decoding(engine)
    engine.add("hungry", text("hungry", engine.free_blocks() - 5), 1)
    engine.add("long", text("long", 20) + text("tail", 0.5), 2)
    until(engine, lambda: bool(engine.answers.get("long")))

    first, *others = (each for each in chunks(engine, "long") if each > 1)
    # All but that was believed to be there.
    assert first == BLOCK_SIZE
    assert len(others) > 5 and set(others[:-1]) == {BOUND}


def test_what_has_landed_is_told_from_what_has_not_without_comparing_each_with_each(make_engine: MakeEngine) -> None:
    class Counted(Request):  # type: ignore[misc]
        compared = 0

        def __eq__(self, other: object) -> bool:
            Counted.compared += 1
            return self is other

        __hash__ = Request.__hash__

    engine = make_engine(decode=GREEDY, tpot_s=TPOT_S)
    queue = engine.scheduler.kv_holding_waiting
    for number in range(120):
        request = engine.request(f"{number}", text(number, 2), 1)
        request.num_computed_tokens = request.num_tokens - 1 if number % 2 else BLOCK_SIZE
        request.__class__ = Counted
        queue.add_request(request)
    # Nothing else of a step looks at them without blocks of their own.
    engine.scheduler._work()
    queue.remove_requests(list(queue))

    assert Counted.compared < 1000


def test_a_prompt_in_its_middle_is_finished_at_once_where_decodes_may_take_its_last_blocks(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(decode=GREEDY, tpot_s=TPOT_S, blocks=30)
    for number in range(3):
        decoding(engine, f"decoder {number}")
    engine.add("long", text("long", engine.free_blocks() - 2), 1)
    engine.turn()
    engine.turn()

    assert chunks(engine, "long")[0] == BOUND
    assert len(chunks(engine, "long")) == 2
    assert engine.scheduler.chunks[Limit.MEMORY] == 1


def test_decodes_that_take_longer_than_they_may_do_not_stop_a_prompt(make_engine: MakeEngine) -> None:
    engine = make_engine(decode=GREEDY, tpot_s=TPOT_S, ttft_s=1000.0)
    decoding(engine)
    engine.scheduler.use_costs(lambda: EngineCosts(decode_step_s=1.0, prefill_s_per_token=0.001))
    engine.add("long", text("long", 5), 2)
    until(engine, lambda: bool(engine.answers.get("long")))

    assert chunks(engine, "long")[:5] == [BLOCK_SIZE] * 5


@pytest.mark.parametrize("tpot_s", [0.0, TPOT_S])
@pytest.mark.parametrize(("v2", "depth"), PROTOCOLS)
def test_a_pull_begins_and_what_has_landed_is_computed_in_the_next_step_whatever_prompts_run(
    make_engine: MakeEngine, v2: bool, depth: int, tpot_s: float
) -> None:
    engine = make_engine(v2=v2, depth=depth, decode=GREEDY, token_budget=64, tpot_s=tpot_s)
    decoding(engine)
    for name in ("long", "longer"):
        engine.add(name, text(name, 60), 2)
    engine.turn()
    engine.remote_tokens["pulled"] = 10 * BLOCK_SIZE
    engine.add("pulled", text("pulled", 10), 3, transfer={"do_remote_prefill": True})
    until(engine, lambda: status(engine, "pulled") is RequestStatus.WAITING_FOR_REMOTE_KVS, most_turns=2)
    until(engine, lambda: "pulled" in engine.scheduler.finished_recving_kv_req_ids, LOAD_STEPS + 2 * depth)
    engine.outputs.clear()
    until(engine, lambda: bool(engine.outputs), most_turns=2)

    assert engine.outputs[0].num_scheduled_tokens["pulled"] == 1
    assert not engine.answers.get("longer")
    until(engine, lambda: len(engine.answers.get("pulled", ())) == 3)
    assert engine.answers["pulled"] == expected_tokens(text("pulled", 10), 3)


def test_a_pull_that_finds_its_prompt_here_is_computed_within_the_bound(make_engine: MakeEngine) -> None:
    engine = make_engine(decode=GREEDY, tpot_s=TPOT_S)
    decoding(engine)
    # There is nothing to be pulled any more.
    engine.add("late", text("late", 10), 2, transfer={"do_remote_prefill": True})
    engine.turn()

    assert chunks(engine, "late") == [BOUND]


@pytest.mark.parametrize(("v2", "depth"), PROTOCOLS)
def test_what_a_decode_has_to_spare_is_spent_once_where_a_step_is_planned_while_another_runs(
    make_engine: MakeEngine, clock: SteppedClock, v2: bool, depth: int
) -> None:
    engine = make_engine(v2=v2, depth=depth, decode=GREEDY, tpot_s=TPOT_S, ttft_s=0.01)
    end_of_step(engine, clock)
    decoding(engine)
    first_s = clock.now_s
    until(engine, lambda: len(engine.answers["decoder"]) == 20)
    engine.add("late", text("late", 100), 1)

    slack = []
    while "late" not in engine.answers:
        engine.turn()
        slack.append((len(engine.answers["decoder"]) - 1) * TPOT_S - (clock.now_s - first_s))

    assert min(slack) >= -COSTS.decode_step_s
    assert engine.scheduler.chunks[Limit.TTFT] > 2, "nothing is spent"


def end_of_step(engine: SimulatedEngine, clock: SteppedClock) -> None:
    """Steps take what they cost, and time passes before their end is told."""
    vars(engine.runner).pop("step")
    update = engine.scheduler.update_from_output

    def update_in_time(output: Any, ran: Any) -> Any:
        prompts = sum(tokens for tokens in output.num_scheduled_tokens.values() if tokens > 1)
        clock.advance(COSTS.decode_step_s + prompts * COSTS.prefill_s_per_token)
        return update(output, ran)

    engine.scheduler.update_from_output = update_in_time
