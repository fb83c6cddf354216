"""`rachis bench prefix-cache`: what is compared with what, what is printed, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.prefix_cache import comparison
from benchmarks.prefix_cache.comparison import (
    BASELINE,
    OPTIMUM,
    POLICIES,
    Capacities,
    Run,
    compare,
    facts,
    figures,
    number_of_replays,
    policy_names,
)  # fmt: skip
from benchmarks.prefix_cache.replay import RECIPES, HitRatios
from benchmarks.token_sizes import parse_tokens
from cluster_core.errors import ConfigError, InvalidInputError
from cluster_sim.workloads.few_shot import SHAPES, generated
from cluster_sim.workloads.traces import MOONCAKE_BLOCK_TOKENS, Trace
from tests.command import handed_over, rachis
from tests.fakes.reports import HeardReports

BLOCK = MOONCAKE_BLOCK_TOKENS
# Blocks of each prompt. With room for two, lru has lost block 2 each time when it is asked for again.
PROMPTS = [[1, 2], [3], [1, 2], [4], [1, 2]]


def small(requests: int = 40) -> Trace:
    return generated(SHAPES["mmlu"], requests=requests, noise_share=0.2)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    file = tmp_path / "five.jsonl"
    file.write_text("".join(line(at, len(ids) * BLOCK, ids) for at, ids in enumerate(PROMPTS)))
    return file


def line(at: int, input_tokens: int, ids: list[int]) -> str:
    row = {"timestamp": at, "input_length": input_tokens, "output_length": 1, "hash_ids": ids}
    return json.dumps(row) + "\n"


def bench(*arguments: object) -> Any:
    return rachis("bench", "prefix-cache", *arguments)


def printed(*arguments: object) -> dict[str, Any]:
    result = bench(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


# The comparison.


def test_the_baseline_always_runs_first_and_nothing_is_named_twice() -> None:
    assert policy_names([]) == policy_names(["all"]) == list(POLICIES)
    assert policy_names(["rachis,lfu", "rachis", BASELINE]) == [BASELINE, "rachis", "lfu"]
    assert policy_names([OPTIMUM]) == [BASELINE, OPTIMUM]


@pytest.mark.parametrize(
    ("given", "said"),
    [(["lfy"], "nearest is 'lfu'"), (["Rachis"], "nearest is 'rachis'"), ([" , "], "must be of lru,")],
)
def test_a_name_that_is_none_is_refused_with_those_that_are(given: list[str], said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        policy_names(given)


def test_what_comes_to_the_same_is_replayed_once() -> None:
    reported, capacities = HeardReports(), Capacities(100, 0)
    runs = compare(small(), POLICIES, capacities, 40, reported)
    assert runs["E"] is runs["hotprefix"] is runs["E+A+P"]
    assert reported.steps_done == 40 * number_of_replays(POLICIES, [capacities])
    assert "E+A+P" not in reported.phases
    with_host = Capacities(100, 100)
    assert number_of_replays(POLICIES, [with_host]) > number_of_replays(POLICIES, [capacities])
    assert number_of_replays(POLICIES, [capacities, with_host]) == number_of_replays(
        POLICIES, [capacities]
    ) + number_of_replays(POLICIES, [with_host])


def test_facts_are_those_of_a_cache_without_end() -> None:
    known = facts(small())
    capacities = Capacities(known.distinct_blocks, 0)
    runs = compare(small(), [BASELINE, OPTIMUM, "rachis"], capacities, known.requests, HeardReports())
    assert all(run.ratios.hit_ratio == pytest.approx(known.ideal_hit_ratio) for run in runs.values())
    assert (known.requests, known.block_tokens) == (40, 16)


def test_figures_are_compared_with_the_baseline_which_copies_everything() -> None:
    runs = {
        BASELINE: Run(HitRatios(0.2, 0.1, 0.1, 60, 40, 0), 1.0),
        "rachis": Run(HitRatios(0.3, 0.25, 0.05, 15, 10, 5), 2.0),
    }
    found = figures(runs, block_bytes=1000)["rachis"]
    assert found["hit_ratio_vs_lru"] == 1.5
    assert found["bytes_copied"] == 25_000
    assert found["bytes_vs_copy_everything"] == 0.25
    assert (found["blocks_copied_out"], found["blocks_copied_back"], found["blocks_promoted"]) == (15, 10, 5)


def test_nothing_is_compared_with_a_baseline_that_has_nothing() -> None:
    nothing = Run(HitRatios(0.0, 0.0, 0.0, 0, 0, 0), 1.0)
    found = figures({BASELINE: nothing, "rachis": nothing}, block_bytes=1)["rachis"]
    assert found["hit_ratio_vs_lru"] is found["bytes_vs_copy_everything"] is None


@pytest.mark.parametrize(
    ("text", "number"), [("0", 0), ("512", 512), ("512k", 512_000), ("2M", 2_000_000), (" 1g ", 10**9)]
)
def test_tokens_are_counted_in_powers_of_ten(text: str, number: int) -> None:
    assert parse_tokens(text, "--device-tokens") == number


# The command.


def test_json_has_every_policy_with_its_shares_and_its_copies(trace: Path) -> None:
    found = printed("--trace", trace, "--device-tokens", 2 * BLOCK, "--host-tokens", 4 * BLOCK, "--policy", "all")
    assert list(found["policies"]) == list(POLICIES)
    for each in found["policies"].values():
        assert each["hit_ratio"] == pytest.approx(each["device_hit_ratio"] + each["host_hit_ratio"], abs=1e-4)
        assert each["bytes_copied"] == each["blocks_copied"] * BLOCK * 131_072
    lru = found["policies"]["lru"]
    # The second block of the prompt that comes back has left the device each time: 2 of 8 blocks.
    assert (lru["device_hit_ratio"], lru["host_hit_ratio"]) == (0.25, 0.25)
    assert (lru["blocks_copied_out"], lru["blocks_copied_back"]) == (4, 2)
    assert found["trace"]["ideal_hit_ratio"] == 0.5
    assert (found["device_blocks"], found["host_blocks"]) == (2, 4)


def test_the_first_requests_only_are_replayed(trace: Path) -> None:
    found = printed("--trace", trace, "--requests", 3, "--device-tokens", 4 * BLOCK, "--policy", "rachis")
    assert found["trace"]["requests"] == 3
    assert {name: each["hit_ratio"] for name, each in found["policies"].items()} == {"lru": 0.4, "rachis": 0.4}


def test_a_curve_has_each_capacity_once_in_order(trace: Path) -> None:
    given = ("--trace", trace, "--capacities", f"{4 * BLOCK},{BLOCK},{4 * BLOCK}", "--policy", "rachis,belady")
    found = printed(*given)
    assert [each["device_tokens"] for each in found["curve"]] == [BLOCK, 4 * BLOCK]
    assert found["curve"][1]["policies"]["belady"]["hit_ratio"] == 0.5


def test_partial_blocks_are_left_out_where_that_is_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "partial.jsonl"
    file.write_text(line(0, 700, [1, 2]) + line(1, 700, [1, 2]))
    given = ("--trace", file, "--policy", "lru")
    assert printed(*given)["policies"]["lru"]["hit_ratio"] == 0.5
    full = printed(*given, "--full-blocks-only")
    assert full["policies"]["lru"]["hit_ratio"] == pytest.approx(512 / 1400, abs=1e-4)
    assert (full["trace"]["blocks"], full["full_blocks_only"]) == (2, True)


@pytest.mark.parametrize("shape", SHAPES)
def test_generated_requests_are_the_same_for_the_same_seed(shape: str) -> None:
    given = (
        "--generated",
        shape,
        "--requests",
        20,
        "--noise-share",
        0.2,
        "--policy",
        "rachis",
        "--device-tokens",
        "8k",
    )
    first, again, other = (printed(*given, "--seed", seed) for seed in (1, 1, 2))
    assert first["trace"] == again["trace"] != other["trace"]
    for found in (first, again):
        for each in found["policies"].values():
            del each["took_s"]
    assert first == again


def test_people_get_tables_of_eighty_columns(trace: Path) -> None:
    many = ",".join(f"{number * BLOCK}" for number in range(1, 11))
    result = bench(
        "--trace", trace, "--device-tokens", 2 * BLOCK, "--host-tokens", 4 * BLOCK, "--capacities", many,
        "--kv-bytes-per-token", 2**30,
    )  # fmt: skip
    assert result.exit_code == 0
    assert all(len(each) <= 80 for each in result.stdout.splitlines())
    for name in POLICIES:
        assert sum(each.startswith(f"{name} ") for each in result.stdout.splitlines()) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--trace: give either --trace or --generated"),
        (["--generated", "mmlu", "--trace", "TRACE"], "--trace: give either --trace or --generated"),
        (["--generated", "mnlu"], "--generated: must be of mmlu, hellaswag, bbh, ceval, got mnlu"),
        (["--generated", "bbh", "--requests", "10000"], "--requests: bbh has 6511 queries, got 10000"),
        (["--trace", "TRACE", "--noise-share", "0.5"], "--noise-share: is for --generated only"),
        (["--trace", "/nowhere.jsonl"], "/nowhere.jsonl cannot be read: No such file or directory"),
        (["--trace", "TRACE", "--policy", "lfy"], "--policy: there is no 'lfy', the nearest is 'lfu'"),
        (["--trace", "TRACE", "--policy", ","], "--policy: must be of lru"),
        (["--trace", "TRACE", "--device-tokens", "2X"], "--device-tokens: must be a number of tokens such as"),
        (["--trace", "TRACE", "--device-tokens", "511"], "--device-tokens: must be from 512 (one block of this trace)"),
        (["--trace", "TRACE", "--device-tokens", "100G"], "--device-tokens: must be from 512"),
        (["--trace", "TRACE", "--host-tokens", "5"], "--host-tokens: must be 0, or from 512"),
        (["--trace", "TRACE", "--capacities", "1M,two"], "--capacities: must be a number of tokens such as"),
        (["--trace", "TRACE", "--capacities", "1M,5"], "--capacities: must be from 512"),
        (["--trace", "TRACE", "--capacities", ","], "--capacities: must be numbers of tokens with commas"),
        (["--trace", "TRACE", "--plot", "a.png"], "--plot: needs at least two --capacities"),
        (["--trace", "TRACE", "--plot", "a.txt", "--capacities", "1M,2M"], "--plot: must end with one of .png,"),
        (["--trace", "TRACE", "--plot", "/nowhere/a.png", "--capacities", "1M,2M"], "--plot: "),
    ],
)
def test_bad_input_is_refused_with_its_option_and_a_reason(trace: Path, arguments: list[str], said: str) -> None:
    refused = bench(*(str(trace) if each == "TRACE" else each for each in arguments)).exception
    assert isinstance(refused, ConfigError | InvalidInputError)
    assert said in str(refused)


@pytest.mark.parametrize(
    ("option", "value"), [("--requests", "0"), ("--noise-share", "2"), ("--kv-bytes-per-token", "0"), ("--seed", "-1")]
)
def test_numbers_out_of_range_are_refused(trace: Path, option: str, value: str) -> None:
    result = bench("--trace", trace, option, value)
    assert result.exit_code == 2
    assert option in result.output


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (line(5, 2000, [1]), "line 6: hash_ids must come to 3 or 4 blocks of 512 for a prompt of 2000 tokens, got 1"),
        (line(5, -1, [1]), "line 6: input_length must be from 1 to"),
        (line(5, 512, [2]), "line 6: hash_ids[0] stands behind another block than where it was first"),
        (line(-7, 512, [1]), "line 6: timestamp must be from 4 (times never go back)"),
        ('{"timestamp": 5}\n', "line 6: input_length is missing"),
        ("{", "line 6: is not JSON"),
    ],
)
def test_a_trace_that_cannot_be_is_refused_with_line_and_field_before_any_replay(
    trace: Path, monkeypatch: pytest.MonkeyPatch, bad: str, said: str
) -> None:
    replayed = handed_over(monkeypatch, comparison, "replay")
    with trace.open("a") as file:
        file.write(bad)
    refused = bench("--trace", trace, "--device-tokens", "2k").exception
    assert isinstance(refused, InvalidInputError)
    assert said in str(refused) and not replayed


def test_every_recipe_is_a_policy_of_the_command() -> None:
    assert set(POLICIES) == {*RECIPES, OPTIMUM}
