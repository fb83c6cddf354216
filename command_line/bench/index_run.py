"""`rachis bench index`: what a placement decision and a block event cost in a full index."""

from dataclasses import asdict

from benchmarks.index import CHUNK_TOKENS, PROMPT_TOKENS, SIZES, IndexFigures, Sizes, measure_all
from command_line.bench.foreign_cores import warn_of_foreign_cores
from command_line.output import out, print_json, print_table
from command_line.progress import progress_reports

# On one core, for a router.
AIMS = {"placement_p50_us": 200, "placement_p99_us": 1000, "events_per_s": 200_000, "bytes_per_entry": 100}


def bench_index(blocks: int, workers: int, seed: int, *, sweep: bool, as_json: bool, sizes: Sizes = SIZES) -> None:
    with progress_reports() as reports:
        result = measure_all(blocks, workers, seed, reports, sweep=sweep, sizes=sizes)
    if as_json:
        whole = asdict(result)
        print_json({**whole.pop("figures"), "aims": AIMS, **whole})
        return
    out.print(f"prompts of {PROMPT_TOKENS} tokens, chunks of {CHUNK_TOKENS}; microseconds unless said otherwise\n")
    figures = result.figures
    print_table(
        "", ("", "measured", "aim"),
        [
            ("placement, P50", f"{figures.placement_p50_us:.0f}", AIMS["placement_p50_us"]),
            ("placement, P99", f"{figures.placement_p99_us:.0f}", AIMS["placement_p99_us"]),
            ("of it hashing, P50", f"{figures.hashing_p50_us:.0f}", ""),
            ("of it lookup, P50", f"{figures.lookup_p50_us:.0f}", ""),
            ("what follows it, P50", f"{figures.accounting_p50_us:.0f}", ""),
            ("events a second", f"{figures.events_per_s:,.0f}", f"{AIMS['events_per_s']:,}"),
            ("bytes an entry", f"{figures.bytes_per_entry:.1f}", AIMS["bytes_per_entry"]),
        ],
    )  # fmt: skip
    for title, rows in (("by entries", result.by_entries), ("by workers", result.by_workers)):
        if rows:
            print_table(f"\n{title}", ("entries", "workers", "P50", "P99", "lookup", "events/s"), list(map(_row, rows)))
    warn_of_foreign_cores([result.foreign_cores])


def _row(figures: IndexFigures) -> tuple[str, ...]:
    return (
        f"{figures.entries:,}",
        str(figures.workers),
        f"{figures.placement_p50_us:.0f}",
        f"{figures.placement_p99_us:.0f}",
        f"{figures.lookup_p50_us:.0f}",
        f"{figures.events_per_s:,.0f}",
    )
