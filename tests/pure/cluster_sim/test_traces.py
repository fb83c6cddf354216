"""Traces: two formats read into one form, everything that cannot be refused by line and field, generated shapes."""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import islice, pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster_core.errors import InvalidInputError
from cluster_sim.workloads.few_shot import SHAPES, FewShotShape, generated
from cluster_sim.workloads.trace_lines import TraceError
from cluster_sim.workloads.traces import Trace, open_trace, read_trace

shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
published_traces = pytest.mark.skipif("RACHIS_TRACES" not in os.environ, reason="RACHIS_TRACES names no folder")


def mooncake(timestamp: Any = 0, input_length: Any = 1000, output_length: Any = 5, hash_ids: Any = (1, 2)) -> Any:
    return {
        "timestamp": timestamp, "input_length": input_length, "output_length": output_length, "hash_ids": hash_ids,
    }  # fmt: skip


def session(*rows: Any, bs: Any = 64) -> Any:
    return {"id": "s", "bs": bs, "tool": 64, "sys": 0, "r": rows}


def row(t_s: Any = 0.0, in_tokens: Any = 130, out_tokens: Any = 7, keep: Any = 0, new_ids: Any = (1, 2)) -> Any:
    return [t_s, 0, in_tokens, out_tokens, keep, new_ids, 0, 0.5]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "small.jsonl"


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


# Mooncake


def test_mooncake_requests_have_seconds_and_their_ids(path: Path) -> None:
    trace = read_trace(write(path, mooncake(0), mooncake(1500, 1025, 0, [1, 2, 9])))
    assert (trace.name, trace.block_tokens) == ("small", 512)
    assert [(each.arrival_s, each.input_tokens, each.output_tokens, each.hashes) for each in trace.requests] == [
        (0.0, 1000, 5, (1, 2)),
        (1.5, 1025, 0, (1, 2, 9)),
    ]


@pytest.mark.parametrize("input_length", [1023, 1024, 1025, 1535])
def test_the_rest_behind_the_full_blocks_may_have_an_id_or_none(path: Path, input_length: int) -> None:
    assert read_trace(write(path, mooncake(input_length=input_length))).requests[0].hashes == (1, 2)


def test_empty_lines_are_passed_over_and_counted(path: Path) -> None:
    path.write_text(f"\n{json.dumps(mooncake())}\n\n{json.dumps(mooncake(-1))}\n")
    with pytest.raises(TraceError, match="line 4: timestamp"):
        read_trace(path)


# Sessions


def test_rows_keep_the_leading_blocks_of_the_row_before(path: Path) -> None:
    rows = [
        row(),
        row(3.0, 200, keep=2, new_ids=[3]),
        row(4.0, 130, keep=1, new_ids=[4]),
        row(4.0, 64, keep=1, new_ids=[]),
    ]
    trace = read_trace(write(path, session(*rows)))
    assert trace.block_tokens == 64
    assert [each.hashes for each in trace.requests] == [(1, 2), (1, 2, 3), (1, 4), (1,)]
    assert [each.arrival_s for each in trace.requests] == [0.0, 3.0, 4.0, 4.0]


def test_equal_ids_of_two_sessions_are_different_blocks(path: Path) -> None:
    trace = read_trace(write(path, session(row()), session(row())))
    first, second = (set(each.hashes) for each in trace.requests)
    assert not first & second
    assert all(0 <= block < 1 << 64 for block in first | second)


def test_sessions_are_interleaved_by_arrival_and_each_keeps_its_own_time(path: Path) -> None:
    times_s = [0.0, 30.0, 31.5, 400.0]
    growing = [row(at, 64 * (n + 1), keep=n, new_ids=[n]) for n, at in enumerate(times_s)]
    trace = read_trace(write(path, *[session(*growing)] * 20), sessions_per_s=0.05, seed=4)
    arrivals = [each.arrival_s for each in trace.requests]
    assert arrivals == sorted(arrivals)
    by_session: dict[int, list[float]] = {}
    for each in trace.requests:
        by_session.setdefault(each.hashes[0], []).append(each.arrival_s)
    assert len(by_session) == 20
    starts = [own[0] for own in by_session.values()]
    assert starts == sorted(starts)
    assert starts[0] == 0.0
    assert starts[5] < by_session[0][-1]
    for own in by_session.values():
        assert own == [own[0] + at for at in times_s]


def test_starts_follow_rate_and_seed(path: Path) -> None:
    write(path, *[session(row())] * 2000)

    def starts(**arguments: Any) -> list[float]:
        return [each.arrival_s for each in read_trace(path, **arguments).requests]

    assert starts(seed=1) == starts(seed=1) != starts(seed=2)
    assert mean(high - low for low, high in pairwise(starts(sessions_per_s=4.0))) == pytest.approx(0.25, rel=0.1)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_rate_that_is_none_is_refused_by_name(path: Path, rate: float) -> None:
    with pytest.raises(InvalidInputError, match="sessions_per_s"):
        open_trace(write(path, session(row())), sessions_per_s=rate)


# Reading


@pytest.mark.parametrize("lines", [[mooncake(), mooncake(7)], [session(row(), row(2.0)), session(row())]])
def test_opened_trace_is_read_anew_by_each_iteration_and_equals_the_read_one(path: Path, lines: list[Any]) -> None:
    trace = open_trace(write(path, *lines))
    assert list(trace) == list(trace)
    assert trace.read() == read_trace(path)


def test_opened_trace_yields_what_stands_before_a_line_that_cannot_be(path: Path) -> None:
    requests: Iterator[Any] = iter(open_trace(write(path, mooncake(), mooncake(-1))))
    assert next(requests).input_tokens == 1000
    with pytest.raises(TraceError, match="line 2: timestamp"):
        next(requests)


REFUSED = [
    # Mooncake: second lines.
    (mooncake(), mooncake(-1), 2, "timestamp", "from 0 "),
    (mooncake(5), mooncake(4), 2, "timestamp", "from 5 .* got 4"),
    (mooncake(), mooncake("now"), 2, "timestamp", "number"),
    (mooncake(), mooncake(float("nan")), 2, "timestamp", "nan"),
    (mooncake(), mooncake(float("inf")), 2, "timestamp", "inf"),
    (mooncake(), mooncake(10**400), 2, "timestamp", r"to 1e\+15"),
    (mooncake(), mooncake(input_length=-1), 2, "input_length", "from 1 to 1073741824, got -1"),
    (mooncake(), mooncake(input_length=0, hash_ids=[]), 2, "input_length", "from 1"),
    (mooncake(), mooncake(input_length=1000.0), 2, "input_length", "whole number"),
    (mooncake(), mooncake(input_length=True), 2, "input_length", "whole number"),
    (mooncake(), mooncake(input_length=1 << 31), 2, "input_length", "1073741824"),
    (mooncake(), mooncake(output_length=-1), 2, "output_length", "from 0"),
    (mooncake(), mooncake(output_length=None), 2, "output_length", "whole number"),
    (mooncake(), mooncake(hash_ids=[]), 2, "hash_ids", "1 or 2 blocks of 512 for a prompt of 1000 tokens, got 0"),
    (mooncake(), mooncake(hash_ids=[1, 2, 3]), 2, "hash_ids", "1 or 2 blocks of 512 for .* got 3"),
    (mooncake(), mooncake(1, 512, hash_ids=[1, 2]), 2, "hash_ids", "1 blocks of 512 for a prompt of 512 .* got 2"),
    (mooncake(), mooncake(hash_ids=[1, -2]), 2, "hash_ids[1]", "from 0"),
    (mooncake(), mooncake(hash_ids=[1, 1 << 64]), 2, "hash_ids[1]", "18446744073709551615"),
    (mooncake(), mooncake(hash_ids=["a", 2]), 2, "hash_ids[0]", "whole number"),
    (mooncake(), mooncake(hash_ids=5), 2, "hash_ids", "list"),
    (mooncake(), mooncake(hash_ids=[3, 2]), 2, "hash_ids[1]", "equal prefixes"),
    (mooncake(), mooncake(hash_ids=[3, 3]), 2, "hash_ids[1]", "equal prefixes"),
    (mooncake(), {"timestamp": 0}, 2, "input_length", "is missing"),
    (mooncake(), [1], 2, "", "JSON object"),
    (mooncake(), session(row()), 2, "timestamp", "is missing"),
    # Sessions.
    (session(row()), session(row(), bs=32), 2, "bs", "64 as on the first line, got 32"),
    (session(row()), session(), 2, "r", "at least one row"),
    (session(row()), {"bs": 64, "r": {}}, 2, "r", "list"),
    (session(row()), {"bs": 64}, 2, "r", "is missing"),
    (session(row(), bs=0), session(row()), 1, "bs", "from 1"),
    (session(row()), session([0.0, 0, 130]), 2, "r[0]", "t_s, depth"),
    (session(row()), session(7), 2, "r[0]", "list"),
    (session(row()), session(row(-0.5)), 2, "r[0].t_s", "from 0 "),
    (session(row()), session(row(2.0), row(1.0)), 2, "r[1].t_s", "from 2 .* got 1"),
    (session(row()), session(row(in_tokens=-130)), 2, "r[0].in_tokens", "from 1"),
    (session(row()), session(row(out_tokens=-1)), 2, "r[0].out_tokens", "from 0"),
    (session(row()), session(row(keep=1)), 2, "r[0].keep", "to 0, the blocks of the row before, got 1"),
    (session(row()), session(row(), row(keep=3)), 2, "r[1].keep", "to 2, the blocks of the row before, got 3"),
    (session(row()), session(row(), row(keep=-1)), 2, "r[1].keep", "from 0"),
    (session(row()), session(row(), row(keep=2)), 2, "r[1].keep and new_ids", "2 or 3 blocks of 64 .* got 4"),
    (session(row()), session(row(new_ids=None)), 2, "r[0].new_ids", "list"),
    (session(row()), session(row(new_ids=[1, -1])), 2, "r[0].new_ids[1]", "from 0"),
    (session(row()), session(row(new_ids=[1, 1 << 32])), 2, "r[0].new_ids[1]", "4294967295"),
    (session(row()), session(row(), row(keep=1, new_ids=[1])), 2, "r[1].blocks[1]", "equal prefixes"),
]  # fmt: skip


@pytest.mark.parametrize(("first", "second", "line", "field", "problem"), REFUSED)
def test_what_cannot_be_is_refused_with_line_field_and_limit(
    path: Path, first: Any, second: Any, line: int, field: str, problem: str
) -> None:
    with pytest.raises(TraceError, match=problem) as refused:
        read_trace(write(path, first, second))
    assert (refused.value.line, refused.value.field) == (line, field)
    assert str(refused.value).startswith(f"{path}, line {line}: {field}")
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < len(str(path)) + 200


@pytest.mark.parametrize("text", [b"{'timestamp': 0}", b"\xff", b"[" * 100_000, b"1" * 5000, b"{"])
def test_line_that_is_not_json_is_refused(path: Path, text: bytes) -> None:
    path.write_bytes(json.dumps(mooncake()).encode() + b"\n" + text)
    with pytest.raises(TraceError, match="line 2: is not JSON") as refused:
        read_trace(path)
    assert len(str(refused.value)) < len(str(path)) + 200


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_empty_file_is_refused(path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(TraceError, match=r"small\.jsonl is empty"):
        open_trace(path)


def test_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read: No such file"):
        open_trace(tmp_path / "none.jsonl")
    with pytest.raises(TraceError, match="cannot be read: Is a directory"):
        open_trace(tmp_path)


@pytest.mark.parametrize(
    ("text", "problem"), [('{"prompt": "a"}', "of no known format"), ("TIMESTAMP,ContextTokens", "not JSON")]
)
def test_unknown_format_is_refused_on_the_first_line(path: Path, text: str, problem: str) -> None:
    path.write_text(text)
    with pytest.raises(TraceError, match=f"line 1: is {problem}"):
        open_trace(path)


json_scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
json_values = json_scalars | st.lists(json_scalars, max_size=4) | st.dictionaries(st.just("a"), json_scalars)


@given(
    value=json_values,
    name=st.sampled_from(["timestamp", "input_length", "output_length", "hash_ids", "bs", "r", "row", 0, 2, 3, 4, 5]),
)
def test_any_value_in_any_field_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, value: Any, name: str | int
) -> None:
    if isinstance(name, int):
        changed_row = row(1.0)
        changed_row[name] = value
        line = session(row(), changed_row)
    elif name in ("bs", "r"):
        line = session(row()) | {name: value}
    elif name == "row":
        line = session(value)
    else:
        line = mooncake() | {name: value}
    path = write(tmp_path_factory.getbasetemp() / "any.jsonl", line)
    try:
        trace = read_trace(path)
    except TraceError:
        return
    for each in trace.requests:
        assert each.input_tokens > 0
        assert each.output_tokens >= 0
        assert -1 < len(each.hashes) - each.input_tokens / trace.block_tokens < 1


# Generated traces


@cache
def whole(name: str) -> Trace:
    """Every query of the shape, once for all tests."""
    return generated(SHAPES[name], seed=3)


def shared_blocks(trace: Trace) -> dict[int, int]:
    """How many requests have each first block."""
    firsts: dict[int, int] = {}
    for each in trace.requests:
        firsts[each.hashes[0]] = firsts.get(each.hashes[0], 0) + 1
    return firsts


@shapes
def test_every_query_of_a_shape_stands_behind_the_examples_of_its_group(shape: FewShotShape) -> None:
    trace = whole(shape.name)
    assert len(trace.requests) == sum(shape.queries)
    assert sorted(shared_blocks(trace).values()) == sorted(shape.queries)


@shapes
def test_shape_has_the_published_mean_length(shape: FewShotShape) -> None:
    trace = whole(shape.name)
    assert mean(each.input_tokens for each in trace.requests) == pytest.approx(shape.input_tokens_mean, rel=0.01)


def test_groups_of_mmlu_are_its_57_subjects_and_answers_are_one_token() -> None:
    assert len(SHAPES["mmlu"].queries) == 57
    assert {each.output_tokens for each in whole("mmlu").requests} == {1}


@shapes
def test_requests_of_a_group_share_the_full_blocks_of_its_examples_and_nothing_else(shape: FewShotShape) -> None:
    trace = generated(shape, requests=150, block_tokens=16, seed=1)
    seen: dict[int, tuple[int, ...]] = {}
    for each in trace.requests:
        assert len(each.hashes) == -(-each.input_tokens // trace.block_tokens)
        assert len(set(each.hashes)) == len(each.hashes)
        other = seen.setdefault(each.hashes[0], each.hashes)
        same = sum(a == b for a, b in zip(other, each.hashes, strict=False))
        assert set(other) & set(each.hashes) == set(other[:same])
        assert other is each.hashes or same * trace.block_tokens < each.input_tokens


def test_queries_are_shuffled() -> None:
    firsts = [each.hashes[0] for each in whole("ceval").requests]
    assert sum(low == high for low, high in pairwise(firsts)) < 0.05 * len(firsts)


def test_noise_is_the_share_asked_for_and_shares_nothing() -> None:
    trace = generated(SHAPES["bbh"], requests=1000, noise_share=0.3, seed=5)
    counts = shared_blocks(trace)
    assert len(trace.requests) == 1000
    assert sum(each for each in counts.values() if each == 1) == 300
    lengths = [each.input_tokens for each in trace.requests if counts[each.hashes[0]] == 1]
    assert mean(lengths) == pytest.approx(723, rel=0.05)


def test_same_arguments_give_the_same_trace_and_another_seed_another() -> None:
    assert generated(SHAPES["bbh"], requests=50, seed=1) == generated(SHAPES["bbh"], requests=50, seed=1)
    assert generated(SHAPES["bbh"], requests=50, seed=1) != generated(SHAPES["bbh"], requests=50, seed=2)


def test_arrivals_rise_at_the_rate() -> None:
    arrivals = [each.arrival_s for each in generated(SHAPES["bbh"], requests_per_s=4.0).requests]
    assert arrivals == sorted(arrivals)
    assert mean(high - low for low, high in pairwise(arrivals)) == pytest.approx(0.25, rel=0.05)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"requests": 0}, "requests"),
        ({"requests": 6512}, "requests"),
        ({"noise_share": 1.1}, "noise_share"),
        ({"noise_share": float("nan")}, "noise_share"),
        ({"requests_per_s": 0.0}, "requests_per_s"),
        ({"block_tokens": 0}, "block_tokens"),
    ],
)
def test_arguments_that_cannot_be_are_refused_by_name(arguments: Any, field: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        generated(SHAPES["bbh"], **arguments)
    assert refused.value.field == field


def test_shape_with_short_examples_shares_no_block() -> None:
    short = replace(SHAPES["mmlu"], queries=(9, 9), input_tokens_mean=12)
    assert all(count == 1 for count in shared_blocks(generated(short, block_tokens=64)).values())


# Published traces, where they are


@published_traces
def test_published_mooncake_trace_has_its_published_ideal_hit_ratios() -> None:
    trace = read_trace(Path(os.environ["RACHIS_TRACES"]) / "mooncake_conversation.jsonl")
    seen: set[int] = set()
    hit_blocks = hit_tokens = 0
    for each in trace.requests:
        hits = sum(block in seen for block in each.hashes)
        hit_blocks += hits
        hit_tokens += min(hits * trace.block_tokens, each.input_tokens)
        seen.update(each.hashes)
    assert len(trace.requests) == 12_031
    assert hit_blocks / sum(len(each.hashes) for each in trace.requests) == pytest.approx(0.366, abs=0.0005)
    assert hit_tokens / sum(each.input_tokens for each in trace.requests) == pytest.approx(0.374, abs=0.0005)


@published_traces
def test_published_sessions_are_read() -> None:
    trace = open_trace(Path(os.environ["RACHIS_TRACES"]) / "coding_agent_sessions.jsonl")
    assert trace.block_tokens == 64
    assert all(len(each.hashes) == each.input_tokens // 64 for each in islice(trace, 1000))
