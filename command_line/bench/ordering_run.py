"""`rachis bench ordering`: the time that each policy takes to order sessions."""

from benchmarks.ordering import SIZES, ordering_table
from command_line.output import print_json, print_table
from command_line.progress import progress_reports
from prefill_worker.policies import POLICIES


def bench_ordering(*, as_json: bool) -> None:
    with progress_reports() as reports:
        reports.total(len(POLICIES) * len(SIZES))
        table = ordering_table(reports.done)
    if as_json:
        by_policy = {
            name: {
                str(size): {"p50_us": round(each.p50_us, 2), "p99_us": round(each.p99_us, 2), "runs": each.runs}
                for size, each in by_size.items()
            }
            for name, by_size in table.items()
        }
        print_json({"policies": by_policy})
        return
    rows = [
        (name, *(f"{each.p50_us:.1f} / {each.p99_us:.1f}" for each in by_size.values()))
        for name, by_size in table.items()
    ]
    print_table("us to order so many sessions: P50 / P99", ("", *map(str, SIZES)), rows)
