"""The dashboard of workers: how many, what they do, what is wrong with one of them, and how batches form."""

from tools.dashboards.expressions import (
    largest,
    of_workers,
    per_second,
    ratio,
    top_workers,
    top_workers_per_second,
    workers_per_second,
)
from tools.dashboards.panel import Dashboard, Kind, Panel, Query, Row

_STEPS = workers_per_second("rachis_decode_steps_total")

POOLS = Dashboard(
    "pools",
    "Rachis: pools",
    "Workers of both pools: whether there are enough, what each has to do, which of them is in trouble.",
    (
        Row(
            "Are there enough?",
            (
                Panel(
                    "Workers, ready of those that are needed",
                    "percentunit",
                    (
                        Query(
                            ratio(
                                largest("rachis_pool_ready_workers", "pool"),
                                largest("rachis_pool_minimum_workers", "pool"),
                            ),
                            "{{pool}}",
                        ),
                    ),
                    Kind.NUMBER,
                    width=6,
                    red_below=1,
                ),
                Panel(
                    "Workers of a pool",
                    "none",
                    (
                        Query(largest("rachis_pool_ready_workers", "pool"), "{{pool}}: ready"),
                        Query(largest("rachis_pool_desired_workers", "pool"), "{{pool}}: desired"),
                        Query(largest("rachis_pool_minimum_workers", "pool"), "{{pool}}: minimum"),
                    ),
                    width=9,
                ),
                Panel(
                    "Workers lost or found hanging, in an hour",
                    "none",
                    (
                        Query("sum by (pool) (increase(rachis_workers_lost_total[1h]))", "lost: {{pool}}"),
                        Query("sum (increase(rachis_workers_found_hanging_total[1h]))", "found hanging"),
                    ),
                    width=9,
                ),
                Panel(
                    "Requests in engines",
                    "none",
                    (Query(of_workers("rachis_worker_requests", "state"), "{{state}}"),),
                ),
                Panel(
                    "Most requests wait at",
                    "none",
                    (Query(top_workers('rachis_worker_requests{state="waiting"}'), "{{worker}}"),),
                ),
                Panel(
                    "Engines that hang in a step",
                    "s",
                    (Query(top_workers("rachis_worker_stalled_seconds > 0"), "{{worker}}"),),
                ),
            ),
        ),
        Row(
            "Hand-offs",
            (
                Panel(
                    "Leased, until they are pulled",
                    "none",
                    (Query(top_workers("rachis_worker_leased_handoffs"), "{{worker}}"),),
                ),
                Panel(
                    "Pulled too late",
                    "cps",
                    (Query(top_workers_per_second("rachis_handoffs_expired_total"), "{{worker}}"),),
                ),
                Panel(
                    "Blocks in quarantine",
                    "none",
                    (Query(top_workers("rachis_worker_quarantined_blocks"), "{{worker}}"),),
                ),
                Panel(
                    "Compared with the sender's, and found to differ",
                    "cps",
                    (
                        Query(workers_per_second("rachis_handoffs_verified_total"), "compared"),
                        Query(workers_per_second("rachis_handoffs_mismatched_total"), "differ"),
                    ),
                ),
            ),
        ),
        Row(
            "Hosts and versions",
            (
                Panel(
                    "Memory of a node that is left",
                    "percentunit",
                    (
                        Query(
                            "bottomk(10, "
                            + ratio(
                                largest("rachis_node_available_bytes", "node"),
                                largest("rachis_node_memory_bytes", "node"),
                            )
                            + ")",
                            "{{node}}",
                        ),
                    ),
                ),
                Panel(
                    "Memory of workers",
                    "bytes",
                    (Query(top_workers("rachis_worker_resident_bytes"), "{{worker}}"),),
                ),
                Panel(
                    "Clocks apart from Redis's",
                    "s",
                    (Query(top_workers("abs(rachis_worker_clock_ahead_seconds)"), "{{worker}}"),),
                ),
                Panel(
                    "Versions of workers",
                    "none",
                    (
                        Query(
                            "count by (rachis, vllm, nixl) "
                            "(max by (worker, rachis, vllm, nixl) (rachis_worker_versions_info))",
                            "Rachis {{rachis}}, vLLM {{vllm}}, NIXL {{nixl}}",
                        ),
                    ),
                    width=12,
                ),
                Panel(
                    "Workers whose versions do not fit",
                    "none",
                    (Query(of_workers("rachis_worker_version_skew"), "workers"),),
                    width=12,
                ),
            ),
        ),
        Row(
            "Decode batches",
            (
                Panel(
                    "Requests of batches",
                    "none",
                    (Query(of_workers("rachis_decode_batch_requests", "state"), "{{state}}"),),
                ),
                Panel(
                    "Mean batch",
                    "none",
                    (Query(ratio(workers_per_second("rachis_decode_step_requests_total"), _STEPS), "requests"),),
                ),
                Panel(
                    "Steps",
                    "cps",
                    (Query(_STEPS, "of all workers"),),
                ),
                Panel(
                    "Wait to join, by why",
                    "none",
                    (Query(of_workers("rachis_decode_waiting_requests", "cause"), "{{cause}}"),),
                ),
                Panel(
                    "Mean wait of who joined, by why",
                    "s",
                    (
                        Query(
                            f"{workers_per_second('rachis_decode_wait_seconds_total', 'cause')} / ignoring (cause) "
                            f"group_left () {workers_per_second('rachis_decode_admissions_total')}",
                            "{{cause}}",
                        ),
                    ),
                ),
                Panel(
                    "Held longest since the worker's start",
                    "s",
                    (Query(top_workers("rachis_decode_longest_held_seconds"), "{{worker}}"),),
                ),
                Panel(
                    "Joined, by why",
                    "cps",
                    (Query(workers_per_second("rachis_decode_admissions_total", "reason"), "{{reason}}"),),
                ),
                Panel(
                    "Prefix that a batch shares",
                    "suffix: tokens",
                    (
                        Query(top_workers("rachis_decode_tip_tokens"), "{{worker}}"),
                        Query(
                            ratio(workers_per_second("rachis_decode_step_shared_tokens_total"), _STEPS),
                            "mean of all steps",
                        ),
                    ),
                ),
                Panel(
                    "Prompts of batches, each shared prefix once",
                    "suffix: tokens",
                    (Query(top_workers("rachis_decode_working_set_tokens"), "{{worker}}"),),
                ),
                Panel(
                    "Shared tokens lost to admissions",
                    "suffix: tokens/s",
                    (Query(workers_per_second("rachis_decode_lost_tokens_total"), "of all workers"),),
                ),
                Panel(
                    "Time of a decision",
                    "s",
                    (
                        Query(
                            ratio(
                                workers_per_second("rachis_decode_decision_seconds_total"),
                                workers_per_second("rachis_decode_decisions_total"),
                            ),
                            "mean",
                        ),
                    ),
                ),
                Panel(
                    "Workers by what decides",
                    "none",
                    (
                        Query(of_workers("rachis_decode_mode", "mode"), "{{mode}}"),
                        Query(
                            "count by (policy) (max by (worker, policy) (rachis_decode_policy_info))",
                            "policy {{policy}}",
                        ),
                    ),
                ),
                Panel(
                    "Measured against order of arrival",
                    "cps",
                    (
                        Query(workers_per_second("rachis_decode_probes_total"), "measured"),
                        Query(workers_per_second("rachis_decode_fallbacks_total"), "order of arrival was faster"),
                    ),
                ),
                Panel(
                    "Placed, by pool",
                    "reqps",
                    (Query(per_second("rachis_placement_decisions_total", "pool", "policy"), "{{pool}}: {{policy}}"),),
                ),
                Panel(
                    "By the objectives",
                    "reqps",
                    (
                        Query(per_second("rachis_placement_ways_total", "way"), "{{way}}"),
                        Query(per_second("rachis_placement_bound_elsewhere_total"), "decoded elsewhere"),
                        Query(per_second("rachis_placement_refused_total", "class"), "refused, {{class}}"),
                    ),
                ),
                Panel(
                    "Workers that decode little",
                    "none",
                    (Query(largest("rachis_placement_prefill_heavy_workers"), "prefill-heavy"),),
                ),
            ),
        ),
    ),
)
