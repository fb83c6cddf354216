"""The part of `rachis status` that `--tiers` adds: what each worker's two tiers saved, and its hottest prefixes."""

from collections.abc import Sequence
from typing import Any

from rachis.v1 import admin_pb2 as admin
from rachis.v1 import worker_pb2 as wire

from command_line.output import out, print_table, short_number

HOTTEST_PREFIXES = 5


def tiers_of(view: admin.WorkerView) -> dict[str, Any] | None:
    """For `--json`. None: the worker has no tiers, or did not answer.

    `hottest_prefixes` is None where the worker had no time to look for them.
    """
    if not view.HasField("tiers"):
        return None
    report = view.tiers
    hottest = [_hot_prefix(each) for each in view.hottest.prefixes] if view.HasField("hottest") else None
    return {
        "prompt_tokens": report.prompt_tokens,
        "hit_tokens": {"device": report.device_hit_tokens, "host": report.host_hit_tokens},
        "hit_ratio": {
            "device": _ratio(report.device_hit_tokens, report.prompt_tokens),
            "host": _ratio(report.host_hit_tokens, report.prompt_tokens),
        },
        "saved_tokens": report.device_hit_tokens + report.host_hit_tokens,
        "blocks": {"device": report.device_blocks, "host": report.host_blocks},
        "capacity_blocks": {"device": report.device_capacity_blocks, "host": report.host_capacity_blocks},
        "evicted_blocks": {"device": report.evicted_device_blocks, "host": report.evicted_host_blocks},
        "evicted_for_others_blocks": {
            "device": report.evicted_device_for_others_blocks,
            "host": report.evicted_host_for_others_blocks,
        },
        "copied_blocks": {"out": report.copied_out_blocks, "back": report.copied_back_blocks},
        "copied_back_async_blocks": report.copied_back_async_blocks,
        "copied_bytes": {"out": report.copied_out_bytes, "back": report.copied_back_bytes},
        "copy_s": {"out": round(report.copy_out_s, 6), "back": round(report.copy_back_s, 6)},
        "failed_copy_blocks": report.failed_copy_blocks,
        "refused_offers": dict(report.refused_offers),
        "promoted_blocks": report.promoted_blocks,
        "promoted_used_blocks": report.promoted_used_blocks,
        "promoted_wasted_blocks": report.promoted_wasted_blocks,
        "hottest_prefixes": hottest,
    }


def print_tiers(workers: Sequence[dict[str, Any]]) -> None:
    """Of the workers as `rachis status --json --tiers` shows them."""
    with_tiers = [worker for worker in workers if worker["tiers"] is not None]
    if with_tiers:
        columns = ("worker", "device", "host", "saved", "GiB out", "GiB back", "refused", "used", "wasted")
        title = "\nshare of prompt tokens found in each tier, tokens saved, copies, promoted blocks"
        print_table(title, columns, [_row(worker) for worker in with_tiers])
    for worker in workers:
        if worker["tiers"] is None:
            why = "has no tiers" if worker["answered"] else "did not answer"
            out.print(f"{worker['worker_id']} {why}", markup=False)
    _print_hottest(with_tiers)


def _print_hottest(workers: Sequence[dict[str, Any]]) -> None:
    rows = [
        (
            worker["worker_id"],
            prefix["hash"],
            prefix["tokens"],
            prefix["device_blocks"],
            prefix["host_blocks"],
            prefix["frequency"],
            f"{prefix['priority']:.4g}",
        )
        for worker in workers
        for prefix in worker["tiers"]["hottest_prefixes"] or ()
    ]
    if rows:
        columns = ("worker", "prefix", "tokens", "device blocks", "host blocks", "frequency", "priority")
        print_table("\nhottest prefixes", columns, rows)
    for worker in workers:
        hottest = worker["tiers"]["hottest_prefixes"]
        if hottest is None:
            out.print(
                f"{worker['worker_id']} is busy: it had no time to look for its hottest prefixes, ask again",
                markup=False,
            )
        elif not hottest:
            out.print(f"{worker['worker_id']} has no prefix cached", markup=False)


def _row(worker: dict[str, Any]) -> tuple[str, ...]:
    tiers = worker["tiers"]
    return (
        worker["worker_id"],
        f"{tiers['hit_ratio']['device']:.1%}",
        f"{tiers['hit_ratio']['host']:.1%}" if tiers["capacity_blocks"]["host"] else "-",
        short_number(tiers["saved_tokens"]),
        f"{tiers['copied_bytes']['out'] / 2**30:.2f}",
        f"{tiers['copied_bytes']['back'] / 2**30:.2f}",
        short_number(sum(tiers["refused_offers"].values())),
        short_number(tiers["promoted_used_blocks"]),
        short_number(tiers["promoted_wasted_blocks"]),
    )


def _hot_prefix(prefix: wire.HotPrefix) -> dict[str, Any]:
    return {
        "hash": prefix.hash,
        "tokens": prefix.tokens,
        "device_blocks": prefix.device_blocks,
        "host_blocks": prefix.host_blocks,
        "frequency": prefix.frequency,
        "priority": prefix.priority,
    }


def _ratio(part: int, whole: int) -> float:
    return round(part / whole, 6) if whole else 0.0
