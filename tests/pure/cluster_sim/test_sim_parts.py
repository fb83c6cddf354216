"""The simulator's small parts: events, links, histograms, workloads."""

import itertools
import math
import random
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from cluster_core.errors import InvalidInputError
from cluster_sim.events import Alarm, EventQueue
from cluster_sim.network import Link, Network
from cluster_sim.reports.figures import Histogram, Series
from cluster_sim.workloads.opening import open_workload
from cluster_sim.workloads.requests import SimRequest
from cluster_sim.workloads.section import WorkloadSection
from kv_transfer.claims.prefix_chunks import chunk_keys, root_key


def drained(events: EventQueue) -> None:
    while events.step():
        pass


# Events


def test_what_happens_at_one_time_happens_in_the_order_it_was_planned() -> None:
    events, seen = EventQueue(), []
    for name, time_s in (("c", 2.0), ("a", 1.0), ("d", 2.0), ("b", 1.0)):
        events.at(time_s, lambda name=name: seen.append((name, events.now_s)))  # type: ignore[misc]
    drained(events)
    assert seen == [("a", 1.0), ("b", 1.0), ("c", 2.0), ("d", 2.0)]


def test_the_past_happens_now() -> None:
    events, seen = EventQueue(), []
    events.at(5.0, lambda: events.at(1.0, lambda: seen.append(events.now_s)))
    drained(events)
    assert seen == [5.0]


def test_of_an_alarm_only_the_last_time_counts() -> None:
    events, rung = EventQueue(), []
    alarm = Alarm(events, lambda: rung.append(events.now_s))
    alarm.set(3.0)
    alarm.set(7.0)
    alarm.set(5.0)
    drained(events)
    alarm.set(9.0)
    alarm.set(math.inf)
    drained(events)
    alarm.set(9.0)
    drained(events)
    assert rung == [5.0, 9.0]


# Links


def test_transfers_share_the_link_that_they_have_in_common() -> None:
    events, ended = EventQueue(), dict[str, float]()
    network = Network(events, latency_s=1.0)
    source, near, far = Link(100.0), Link(100.0), Link(100.0)
    network.start(source, near, 100.0, lambda: ended.update(first=events.now_s))
    network.start(source, far, 100.0, lambda: ended.update(second=events.now_s))
    drained(events)
    assert ended == {"first": pytest.approx(3.0), "second": pytest.approx(3.0)}


def test_who_leaves_a_link_leaves_its_share_to_the_others() -> None:
    events, ended = EventQueue(), dict[str, float]()
    network = Network(events, latency_s=0.0)
    source, target = Link(100.0), Link(100.0)
    network.start(source, target, 50.0, lambda: ended.update(short=events.now_s))
    network.start(source, target, 150.0, lambda: ended.update(long=events.now_s))
    gone = network.start(source, target, 1000.0, lambda: ended.update(gone=events.now_s))
    events.at(0.6, gone.cancel)
    drained(events)
    # Three share 100 a second for 0.6 s (20 each), two until the short one has its 50 (0.6 s), one for the rest.
    assert ended == {"short": pytest.approx(1.2), "long": pytest.approx(2.2)}


def test_a_cut_link_lets_nothing_through_until_it_is_mended() -> None:
    events, ended = EventQueue(), dict[str, float]()
    network = Network(events, latency_s=0.0)
    source, target = Link(100.0), Link(100.0)
    network.start(source, target, 100.0, lambda: ended.update(at=events.now_s))

    def set_to(factor: float) -> None:
        target.factor = factor
        network.adjust((source, target))

    events.at(0.5, lambda: set_to(0.0))
    events.at(4.5, lambda: set_to(1.0))
    drained(events)
    assert ended == {"at": pytest.approx(5.0)}


def test_random_transfers_all_end_and_no_link_passes_more_than_it_can() -> None:
    rng, events = random.Random(3), EventQueue()
    network, links = Network(events, latency_s=0.001), [Link(1000.0) for _ in range(6)]
    ended, sent = [0], [0.0]

    def done() -> None:
        ended[0] += 1

    def start(source: Link, target: Link, size: float) -> None:
        network.start(source, target, size, done)

    for _ in range(100):
        size = rng.uniform(1, 2000)
        sent[0] += size
        source, target = links[rng.randrange(3)], links[3 + rng.randrange(3)]
        events.at(rng.uniform(0, 50), partial(start, source, target, size))
    drained(events)
    assert ended[0] == 100
    assert not any(link.transfers for link in links)
    assert events.now_s >= sent[0] / 3000


# Figures


def test_quantiles_of_a_histogram_are_within_a_percent() -> None:
    rng, histogram = random.Random(1), Histogram()
    values = sorted(rng.lognormvariate(0, 2) for _ in range(20_000))
    for value in values:
        histogram.add(value)
    for share in (0.01, 0.5, 0.9, 0.99):
        assert histogram.quantile(share) == pytest.approx(np.quantile(values, share), rel=0.012)
    assert histogram.mean == pytest.approx(np.mean(values))
    assert len(histogram.ccdf()) < 2500


def test_nothing_and_zero_are_counted() -> None:
    histogram = Histogram()
    assert (histogram.quantile(0.5), histogram.mean) == (0.0, 0.0)
    histogram.add(0.0)
    histogram.add(1.0)
    assert histogram.quantile(0.5) == 0.0
    assert histogram.ccdf()[-1][1] == 0.0


def test_a_series_keeps_its_sum_while_its_windows_grow() -> None:
    series = Series()
    for second in range(10_000):
        series.add(second, 2.0)
    points = series.per_s()
    assert len(points) <= 200
    assert sum(rate * series.window_s for _, rate in points) == pytest.approx(20_000)
    assert points[10][1] == pytest.approx(2.0)


# Workloads

STREAMS = ("crawler", "anns")
DRAWN = ("conversation", "prefix_groups", "prefix_tree", "agents", "mmlu")


def taken(number: int = 150, seed: int = 0, **given: object) -> list[SimRequest]:
    section = WorkloadSection.model_validate({"requests": number, "requests_per_s": 5.0, **given})
    return list(open_workload(section, seed))


@pytest.mark.parametrize("kind", DRAWN)
def test_a_workload_is_the_same_each_time_and_another_with_another_seed(kind: str) -> None:
    def summary(seed: int) -> list[tuple[float, int, int, tuple[int, ...]]]:
        return [
            (each.arrival_s, each.prompt_tokens, each.output_tokens, tuple(each.keys.tolist()))
            for each in taken(50, seed, kind=kind)
        ]

    first = summary(0)
    assert first == summary(0)
    assert first != summary(1)
    assert len(first) == 50


@pytest.mark.parametrize("kind", DRAWN)
def test_requests_come_by_arrival_with_a_key_for_each_full_block(kind: str) -> None:
    requests = taken(kind=kind, block_tokens=32)
    assert [each.arrival_s for each in requests] == sorted(each.arrival_s for each in requests)
    for each in requests:
        assert len(each.keys) == each.prompt_tokens // 32
        assert each.prompt_tokens >= 1 <= each.output_tokens


@pytest.mark.parametrize("kind", DRAWN)
def test_equal_keys_stand_behind_equal_keys(kind: str) -> None:
    before: dict[int, int] = {}
    for request in taken(kind=kind):
        for predecessor, key in itertools.pairwise([0, *request.keys.tolist()]):
            assert before.setdefault(key, predecessor) == predecessor


def test_conversations_have_about_the_published_shape() -> None:
    """Mooncake: input mean 12,035 and median 6,909, output mean 343, 0.37 of the tokens seen before."""
    requests = taken(1000, kind="conversation")
    seen: set[int] = set()
    hits = 0
    for each in requests:
        hits += sum(key in seen for key in each.keys.tolist()) * 64
        seen.update(each.keys.tolist())
    tokens = [each.prompt_tokens for each in requests]
    assert 10_500 < np.mean(tokens) < 13_500
    assert 6_000 < np.median(tokens) < 8_000
    assert 250 < np.mean([each.output_tokens for each in requests]) < 450
    assert 0.25 < hits / sum(tokens) < 0.5


@pytest.mark.parametrize(("arrivals", "variation"), [("poisson", 1.0), ("bursty", 3.0)])
def test_arrivals_have_the_rate_and_the_burstiness_that_was_asked_for(arrivals: str, variation: float) -> None:
    requests = taken(2000, kind="prefix_groups", arrivals=arrivals, requests_per_s=20.0, burstiness=3.0)
    gaps = np.diff([each.arrival_s for each in requests])
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.1)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.15)


def test_tenants_share_nothing_and_a_few_send_most() -> None:
    requests = taken(1000, kind="prefix_groups", tenants=10, groups=1, own_tokens=0)
    keys: dict[str, set[int]] = {}
    for each in requests:
        keys.setdefault(each.tenant, set()).update(each.keys.tolist())
    assert len(keys) == 10
    for one, other in itertools.combinations(keys.values(), 2):
        assert not one & other
    assert sum(each.tenant == "tenant-0" for each in requests) > 200


def test_a_group_shares_its_prefix_and_a_tree_its_levels() -> None:
    groups = {tuple(each.keys[:10].tolist()) for each in taken(kind="prefix_groups", groups=7, shared_tokens=640)}
    assert len(groups) == 7
    tree = taken(500, kind="prefix_tree", groups=2, levels=3, shared_tokens=64 * 9)
    levels = [len({each.keys[depth - 1] for each in tree}) for depth in (3, 6, 9)]
    assert levels == [2, 4, 8]


@pytest.mark.parametrize("kind", STREAMS)
def test_a_stream_ends_with_its_prompt_and_waiting_for_it_sends_the_same(kind: str) -> None:
    sessions, whole = (taken(4, kind=kind, streaming=streaming) for streaming in (True, False))
    assert sorted(each.keys.tolist() for each in sessions) == sorted(each.keys.tolist() for each in whole)
    assert [each.arrival_s for each in whole] == sorted(each.complete_s for each in sessions)
    for each in sessions:
        ids: list[int] = []
        for after_s, following in each.inputs:
            before, ids = ids, list(following.tokens) if following.replaces else [*ids, *following.tokens]
            kept = following.kept_tokens
            assert (len(ids), ids[:kept]) == (following.prompt_tokens, before[:kept])
            assert kept in (len(before), len(ids)) or ids[kept] != before[kept] or not before
            assert after_s <= each.inputs[-1][0]
        assert [following.is_last for _, following in each.inputs].index(True) == len(each.inputs) - 1
        assert len(ids) == each.prompt_tokens
        assert each.keys.tolist() == chunk_keys(ids, root_key("simulated", ""), 64).tolist()
    with pytest.raises(InvalidInputError, match="tenants"):
        taken(5, kind=kind, tenants=2)


def test_sessions_of_agents_run_from_the_beginning() -> None:
    requests = taken(800, kind="agents", arrivals="trace", requests_per_s=10.0)
    assert 800 / requests[-1].arrival_s == pytest.approx(10.0, rel=0.2)
    assert sum(each.arrival_s < 20 for each in requests) == pytest.approx(200, rel=0.3)


@pytest.mark.parametrize("kind", ["conversation", "agents"])
def test_a_scale_shortens_prompts_and_answers_and_leaves_who_shares_with_whom(kind: str) -> None:
    whole, short = taken(kind=kind, block_tokens=16), taken(kind=kind, block_tokens=16, token_scale=0.25)
    for one, other in zip(whole, short, strict=True):
        assert other.prompt_tokens == pytest.approx(one.prompt_tokens / 4, abs=1)
        assert other.output_tokens == pytest.approx(one.output_tokens / 4, abs=1)
        assert len(other.keys) == other.prompt_tokens // 16

    named = [number for number, each in enumerate(short) if len(each.keys)]
    whole_firsts, short_firsts = ([requests[number].keys[0] for number in named] for requests in (whole, short))
    assert len(set(short_firsts)) < len(named)
    # The same ones begin alike.
    pairs = set(zip(whole_firsts, short_firsts, strict=True))
    assert len(pairs) == len(set(whole_firsts)) == len(set(short_firsts))


def test_a_scale_shortens_the_contexts_of_sessions() -> None:
    whole, short = taken(kind="crawler"), taken(kind="crawler", token_scale=0.25)
    assert sum(each.prompt_tokens for each in short) == pytest.approx(
        sum(each.prompt_tokens for each in whole) / 4, rel=0.05
    )


TRACE = """{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]}
{"timestamp": 3000, "input_length": 1100, "output_length": 0, "hash_ids": [1, 2, 4]}
{"timestamp": 3000, "input_length": 512, "output_length": 7, "hash_ids": [1]}
{"timestamp": 6000, "input_length": 513, "output_length": 7, "hash_ids": [1, 9]}
"""


def test_a_trace_that_is_too_short_starts_again_with_prompts_that_nobody_has_seen(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(TRACE)
    requests = taken(10, kind="trace", file=path, arrivals="trace", speed=2.0)
    assert len(requests) == 10
    turns = [requests[:4], requests[4:8], requests[8:]]
    keys = [{key for each in turn for key in each.keys.tolist()} for turn in turns]
    assert not keys[0] & keys[1] and not keys[1] & keys[2]
    assert [len(each.keys) for each in turns[0]] == [2, 2, 1, 1] == [len(each.keys) for each in turns[1]]
    assert [each.output_tokens for each in turns[0]] == [5, 1, 7, 7]
    arrivals = [each.arrival_s for each in requests]
    assert arrivals == sorted(arrivals)
    assert arrivals[0] == 0.0 and 1.5 <= arrivals[1] < arrivals[2] < 3.0
    assert len(taken(0, kind="trace", file=path, arrivals="trace")) == 4


def test_a_table_of_lengths_has_prompts_that_share_nothing(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
                    "2023-11-16 18:15:50.9951690,396,109\n")  # fmt: skip
    first, second = taken(0, kind="azure", file=path, arrivals="trace")
    assert (first.prompt_tokens, first.output_tokens, first.arrival_s) == (374, 44, 0.0)
    assert second.arrival_s == pytest.approx(4.314579)
    assert not set(first.keys.tolist()) & set(second.keys.tolist())
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n")
    with pytest.raises(InvalidInputError, match="has no requests"):
        taken(5, kind="azure", file=path, arrivals="trace")
    with pytest.raises(InvalidInputError, match="cannot be read"):
        taken(5, kind="azure", file=tmp_path, arrivals="trace")
    path.write_text("TIMESTAMP,ContextTokens\nyesterday,3\n")
    with pytest.raises(InvalidInputError, match="line 2: needs TIMESTAMP"):
        taken(0, kind="azure", file=path, arrivals="trace")


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"kind": "chess"}, "workload.kind"),
        ({"kind": "trace"}, "workload.file"),
        ({"kind": "conversation", "requests": 0}, "workload.requests"),
        ({"kind": "conversation", "requests_per_s": 0}, "workload.requests_per_s"),
        ({"kind": "trace", "file": "nowhere", "arrivals": "poisson", "requests_per_s": 0}, "workload.requests_per_s"),
    ],
)
def test_what_cannot_be_sent_is_refused_by_its_field(given: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidInputError) as raised:
        taken(**{"number": 10, **given})  # type: ignore[arg-type]
    assert raised.value.field == field
