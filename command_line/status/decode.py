"""The part of `rachis status` that `--decode` adds: how each decode worker forms its batch, and what waits and why."""

from collections.abc import Callable, Sequence
from typing import Any

from rachis.v1 import admin_pb2 as admin
from rachis.v1 import worker_pb2 as wire

from command_line.output import out, print_table, short_number

BATCH_ENTRIES = 10

# (worker id, what `decode_of` gives).
_Reports = Sequence[tuple[str, dict[str, Any]]]


def decode_of(view: admin.WorkerView) -> dict[str, Any] | None:
    """For `--json`. None: the worker does not form its batch by shared prefixes, or did not answer.

    `batch` is None where the worker had no time to report it.
    """
    if not view.HasField("decode"):
        return None
    report = view.decode
    admitted = sum(report.admissions.values())
    return {
        "policy": report.policy,
        "mode": report.mode,
        "running_requests": report.running_requests,
        "loading_requests": report.loading_requests,
        "waiting_requests": dict(report.waiting),
        "tip_tokens": report.tip_tokens,
        "working_set_tokens": report.working_set_tokens,
        "steps": report.steps,
        "mean_batch": _mean(report.batch_sum, report.steps),
        "mean_shared_tokens": _mean(report.shared_tokens_sum, report.steps),
        "admissions": dict(report.admissions),
        "lost_tokens": report.lost_tokens,
        "lost_tokens_per_admission": _mean(report.lost_tokens, admitted),
        "wait_s": {cause: round(wait_s, 6) for cause, wait_s in report.wait_s.items()},
        "longest_held_s": round(report.longest_held_s, 6),
        "decisions": report.decisions,
        "decision_s": round(report.decision_s, 6),
        "decision_us": _mean(report.decision_s * 1e6, report.decisions),
        "probes": report.probes,
        "fallbacks": report.fallbacks,
        "batch": _batch(view.batch) if view.HasField("batch") else None,
    }


def print_decode(workers: Sequence[dict[str, Any]]) -> None:
    """Of the workers as `rachis status --json --decode` shows them."""
    decoding = [worker for worker in workers if worker["pool"] in ("decode", "shared")]
    if not decoding:
        out.print("there is no decode worker among them")
    reports = [(worker["worker_id"], worker["decode"]) for worker in decoding if worker["decode"] is not None]
    if reports:
        _print_batches(reports)
        _print_history(reports)
        _print_groups(reports)
        _print_causes(reports)
        _print_waiting(reports)
        _print_table_of_policy(reports)
    for worker in decoding:
        if worker["decode"] is None:
            why = "does not form its batch by shared prefixes" if worker["answered"] else "did not answer"
            out.print(f"{worker['worker_id']} {why}", markup=False)
        elif worker["decode"]["batch"] is None:
            out.print(f"{worker['worker_id']} is busy: it had no time to tell of its batch, ask again", markup=False)


def _print_batches(workers: _Reports) -> None:
    rows = [
        (
            worker,
            decode["policy"],
            decode["mode"],
            decode["running_requests"],
            decode["loading_requests"],
            sum(decode["waiting_requests"].values()),
            short_number(decode["tip_tokens"]),
            short_number(decode["working_set_tokens"]),
        )
        for worker, decode in workers
    ]
    columns = ("worker", "policy", "in force", "running", "loading", "waiting", "tip", "working set")
    print_table("\nthe batch of each decode worker; shared prefix and working set in tokens", columns, rows)


def _print_history(workers: _Reports) -> None:
    rows = [
        (
            worker,
            f"{decode['mean_batch']:.1f}",
            f"{decode['mean_shared_tokens']:.0f}",
            short_number(sum(decode["admissions"].values())),
            short_number(decode["admissions"].get("overdue", 0)),
            f"{decode['lost_tokens_per_admission']:.1f}",
            _seconds(decode["longest_held_s"]),
            f"{decode['decision_us']:.0f} us",
            decode["probes"],
            decode["fallbacks"],
        )
        for worker, decode in workers
    ]
    columns = (
        "worker", "batch", "shared", "admitted", "overdue", "lost", "longest held", "decision", "probes", "fallbacks",
    )  # fmt: skip
    print_table(
        "\nsince they started; means of a step: batch, tip; of an admission: tokens lost",
        columns,
        rows,
    )


def _print_groups(workers: _Reports) -> None:
    def row(group: dict[str, Any]) -> tuple[object, ...]:
        return group["hash"] or "none", group["tokens"], group["running"], group["waiting"]

    columns = ("prefix", "tokens", "running", "waiting")
    _print_entries("largest prefix groups", columns, workers, "groups", row)


def _print_causes(workers: _Reports) -> None:
    rows = [
        (
            worker,
            cause,
            decode["waiting_requests"].get(cause, 0),
            _seconds((decode["batch"] or {}).get("longest_wait_s", {}).get(cause)),
            _seconds(decode["wait_s"].get(cause, 0.0)),
        )
        for worker, decode in workers
        for cause in sorted({*decode["waiting_requests"], *decode["wait_s"]})
    ]
    if rows:
        columns = ("worker", "cause", "waiting now", "longest of these", "all of those before")
        print_table("\nwhy requests wait", columns, rows)


def _print_waiting(workers: _Reports) -> None:
    def row(request: dict[str, Any]) -> tuple[object, ...]:
        return (
            request["request_id"],
            request["prompt_tokens"],
            _seconds(request["waited_s"]),
            request["cause"],
            request["shared_tokens"],
            request["priority"],
        )

    columns = ("request", "prompt tokens", "waited", "cause", "shared", "priority")
    _print_entries("the first requests that wait", columns, workers, "waiting", row)


def _print_table_of_policy(workers: _Reports) -> None:
    def row(state: dict[str, Any]) -> tuple[object, ...]:
        return (
            state["batch"],
            state["loss"],
            state["peers"],
            state["adds"],
            _value(state["add_value"]),
            state["stops"],
            _value(state["stop_value"]),
        )

    columns = ("batch", "loss", "peers", "adds", "worth", "stops", "worth")
    _print_entries("what the policy has learned, by state of the batch", columns, workers, "table", row)


def _print_entries(
    title: str,
    columns: Sequence[str],
    workers: _Reports,
    name: str,
    row: Callable[[dict[str, Any]], tuple[object, ...]],
) -> None:
    """A table over all workers' batches, where there is anything."""
    rows = [(worker, *row(entry)) for worker, decode in workers for entry in (decode["batch"] or {}).get(name, ())]
    if rows:
        print_table(f"\n{title}", ("worker", *columns), rows)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def _value(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _batch(batch: wire.DecodeBatch) -> dict[str, Any]:
    return {
        "groups": [
            {"hash": group.hash, "tokens": group.tokens, "running": group.running, "waiting": group.waiting}
            for group in batch.groups
        ],
        "waiting": [
            {
                "request_id": request.request_id,
                "prompt_tokens": request.prompt_tokens,
                "waited_s": round(request.waited_s, 6),
                "cause": request.cause,
                "shared_tokens": request.shared_tokens,
                "priority": request.priority,
            }
            for request in batch.waiting
        ],
        "longest_wait_s": {cause: round(wait_s, 6) for cause, wait_s in batch.longest_wait_s.items()},
        "table": [
            {
                "batch": row.batch,
                "loss": row.loss,
                "peers": row.peers,
                "adds": row.adds,
                "stops": row.stops,
                "add_value": row.add_value if row.HasField("add_value") else None,
                "stop_value": row.stop_value if row.HasField("stop_value") else None,
            }
            for row in batch.table
        ],
    }


def _mean(total: float, number: int) -> float:
    return round(total / number, 6) if number else 0.0
