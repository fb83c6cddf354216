"""`rachis bench cht`: what the operations of the chunked hash tree cost, beside what else there is."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.cht.play import OPERATIONS
from benchmarks.cht.plot import save_plot
from benchmarks.cht.speed import MOST_CHUNKS, SIZES, Sizes, measure
from benchmarks.cht.workload import BLOCK_TOKENS, ChtWorkload
from cluster_core.errors import ConfigError
from command_line.bench.foreign_cores import warn_of_foreign_cores
from command_line.output import out, print_json, print_table
from command_line.output_files import check_picture
from command_line.progress import progress_reports

# Of all prefixes together.
_MOST_PREFIX_TOKENS = 100_000_000


def bench_cht(workload: ChtWorkload, plot: Path | None, *, as_json: bool, sizes: Sizes = SIZES) -> None:
    check(workload)
    if plot is not None:
        check_picture(plot, "--plot")
    with progress_reports() as reports:
        result = measure(workload, reports, sizes)
    prompts = f"of {workload.tokens} tokens in {workload.groups} groups, chunks of {workload.chunk_tokens}"
    if plot is not None:
        save_plot(result["by_waiting"], f"requests {prompts}, hashes reused", plot)
    if as_json:
        print_json({**result, "plot": str(plot) if plot is not None else None})
        return
    out.print(f"{workload.requests} requests {prompts}\n")
    _print(result)
    warn_of_foreign_cores([result["foreign_cores"]])
    if plot is not None:
        out.print(f"picture in {plot}")


def check(workload: ChtWorkload) -> None:
    """Before anything is measured. Raises ConfigError."""
    least = workload.reused_chunk_tokens
    if workload.tokens < least:
        raise ConfigError(
            f"must be at least one chunk, {least} in whole blocks of {BLOCK_TOKENS}, got {workload.tokens}",
            field="--tokens",
        )
    if workload.groups > workload.requests:
        raise ConfigError(f"must be at most --requests, {workload.requests}, got {workload.groups}", field="--groups")
    if workload.groups * workload.tokens > _MOST_PREFIX_TOKENS:
        most = _MOST_PREFIX_TOKENS // workload.tokens
        raise ConfigError(f"must be at most {most} of so many tokens, got {workload.groups}", field="--groups")
    if workload.chunks > MOST_CHUNKS:
        least = -(-workload.tokens // MOST_CHUNKS)
        raise ConfigError(f"must be at least {least} for so many tokens", field="--chunk-tokens")
    if workload.chunks * workload.requests > SIZES.most_hashes:
        most = SIZES.most_hashes // workload.chunks
        raise ConfigError(f"must be at most {most} of {workload.chunks} chunks", field="--requests")


def _print(result: Mapping[str, Any]) -> None:
    columns = {"computed": result, "reused": result["reused"], "published": result["published"]}
    columns["paper, C++"] = result["paper"]
    aims, finds = result["aims"], result["workload"]["finds"]
    print_table(
        "ns an operation, and us a request", ("", *columns),
        [
            *((name, *(each[f"{name}_ns"] for each in columns.values())) for name in OPERATIONS),
            (f"a request, {finds:g} finds", *(f"{each['per_request_us']:.1f}" for each in columns.values())),
            ("aim", aims["per_request_us"], aims["reused_per_request_us"], "-", "-"),
            ("with Python's gc", *(f"{each['per_request_us_with_gc']:.1f}" for each in list(columns.values())[:2]),
             "-", "-"),
        ],
    )  # fmt: skip
    out.print(
        "computed: insert hashes the tokens; reused: it takes vLLM's hashes of blocks;\n"
        f"published: the paper's algorithms in Python, {result['published']['requests']} requests, hashes computed;\n"
        "paper: 5000 requests of 5000 tokens, on another machine"
    )
    names = [*(f"{each}_ns" for each in OPERATIONS), "per_request_us"]
    rows = [(row["waiting"], *(row[name] for name in [*names, "longest_ms"])) for row in result["by_waiting"]]
    print_table(
        "\nby waiting requests, hashes reused", ("waiting", *OPERATIONS, "a request, us", "longest, ms"),
        [*rows, ("largest / smallest", *(result["largest_to_smallest"][name] for name in names), "")],
    )  # fmt: skip
    if result["waiting_left_out"]:
        out.print(f"too many chunks for {', '.join(map(str, result['waiting_left_out']))} waiting requests: left out")
    ours_us, orders = result["decision_us"], result["orders"]
    print_table(
        f"\nus a decision among {orders['waiting']} waiting requests, and to insert one",
        ("", "over", "insert", "decision", "x ours"),
        [
            ("chunked hash tree", "chunks", f"{result['reused']['insert_ns'] / 1e3:.1f}", f"{ours_us:.1f}", "1"),
            *(
                (name.replace("_", " "), over, f"{each['insert_ns'] / 1e3:.1f}", f"{each['decision_us']:.0f}",
                 f"{each['decision_us'] / ours_us:.0f}")
                for name in ("longest_prefix_match", "depth_first_by_weight")
                for over, each in orders[name].items()
            ),
        ],
    )  # fmt: skip
    out.print("each decision orders all who wait; where n join on one order, divide by n")
