"""The dashboard of cached prefixes: how much of the prompts is found, where it lies, and whether the index is right."""

from tools.dashboards.expressions import (
    largest,
    of_workers,
    per_second,
    ratio,
    top_workers,
    total,
    workers_per_second,
)
from tools.dashboards.panel import Dashboard, Kind, Panel, Query, Row

_FOUND = workers_per_second("rachis_tier_hit_tokens_total", "tier")
_PROMPTS = workers_per_second("rachis_tier_prompt_tokens_total")
_EXPECTED = per_second("rachis_placement_hit_tokens_total", "pool", "tier")
_PLACED = per_second("rachis_placement_prompt_tokens_total", "pool")

CACHES = Dashboard(
    "caches",
    "Rachis: caches",
    "Cached prefixes: what is found of prompts, what lies in device and host memory, and what routers believe of it.",
    (
        Row(
            "Is it found?",
            (
                Panel(
                    "Prompt tokens found and not computed",
                    "percentunit",
                    (Query(f"{_FOUND} / ignoring (tier) group_left () {_PROMPTS}", "{{tier}}"),),
                    Kind.NUMBER,
                    width=6,
                ),
                Panel(
                    "Placed by load alone",
                    "reqps",
                    (Query(per_second("rachis_placement_load_only_total"), "the index was stale"),),
                    Kind.NUMBER,
                    width=6,
                ),
                Panel(
                    "Routers whose index is stale",
                    "none",
                    (Query(total("rachis_index_stale"), "routers"),),
                    Kind.NUMBER,
                    width=6,
                    red_from=1,
                ),
                Panel(
                    "Workers whose claims are not all there",
                    "none",
                    (
                        Query("count (min by (worker) (rachis_index_in_sync) == 0) or vector(0)", "not in sync"),
                        Query("count (max by (worker) (rachis_index_silent) == 1) or vector(0)", "silent"),
                    ),
                    Kind.NUMBER,
                    width=6,
                    red_from=1,
                ),
                Panel(
                    "Found, of prompts that have begun",
                    "percentunit",
                    (Query(f"{_FOUND} / ignoring (tier) group_left () {_PROMPTS}", "{{tier}}"),),
                    width=12,
                ),
                Panel(
                    "Expected at placement, of prompts that were placed",
                    "percentunit",
                    (Query(f"{_EXPECTED} / ignoring (tier) group_left () {_PLACED}", "{{pool}}: {{tier}}"),),
                    width=12,
                ),
            ),
        ),
        Row(
            "Tiers",
            (
                Panel(
                    "Blocks that are filled",
                    "percentunit",
                    (
                        Query(
                            ratio(
                                of_workers("rachis_tier_blocks", "tier"),
                                of_workers("rachis_tier_capacity_blocks", "tier"),
                            ),
                            "{{tier}}",
                        ),
                    ),
                ),
                Panel(
                    "Evicted",
                    "suffix: blocks/s",
                    (
                        Query(workers_per_second("rachis_tier_evicted_total", "tier"), "{{tier}}"),
                        Query(
                            workers_per_second("rachis_tier_evicted_for_others_total", "tier"),
                            "{{tier}}, for other tenants",
                        ),
                    ),
                ),
                Panel(
                    "Promoted blocks",
                    "suffix: blocks/s",
                    (Query(workers_per_second("rachis_tier_promotions_total", "outcome"), "{{outcome}}"),),
                ),
                Panel(
                    "Copied to host memory and back",
                    "binBps",
                    (Query(workers_per_second("rachis_tier_copied_bytes_total", "direction"), "{{direction}}"),),
                ),
                Panel(
                    "Time of copying, in each second",
                    "s",
                    (Query(workers_per_second("rachis_tier_copy_seconds_total", "direction"), "{{direction}}"),),
                ),
                Panel(
                    "Offered to host memory and not copied",
                    "cps",
                    (Query(workers_per_second("rachis_tier_refused_total", "reason"), "{{reason}}"),),
                ),
            ),
        ),
        Row(
            "The routers' index",
            (
                Panel(
                    "Chunks, of those that have room",
                    "percentunit",
                    (
                        Query(
                            ratio(
                                largest("rachis_index_entries", "instance"),
                                largest("rachis_index_capacity_entries", "instance"),
                            ),
                            "{{instance}}",
                        ),
                    ),
                ),
                Panel(
                    "Chunks forgotten for hotter ones",
                    "cps",
                    (Query(per_second("rachis_index_dropped_total", "instance"), "{{instance}}"),),
                ),
                Panel(
                    "Memory",
                    "bytes",
                    (Query(largest("rachis_index_bytes", "instance"), "{{instance}}"),),
                ),
                Panel(
                    "Since all streams were last read",
                    "s",
                    (Query(largest("rachis_index_staleness_seconds", "instance"), "{{instance}}"),),
                ),
                Panel(
                    "Redis answers the index",
                    "none",
                    (Query(largest("rachis_index_connected", "instance"), "{{instance}}"),),
                ),
                Panel(
                    "Behind, by worker",
                    "suffix: batches",
                    (Query(top_workers("rachis_index_lag_batches"), "{{worker}}"),),
                ),
                Panel(
                    "Taken in",
                    "cps",
                    (
                        Query(per_second("rachis_index_batches_total"), "batches"),
                        Query(per_second("rachis_index_keys_total"), "chunks"),
                        Query(per_second("rachis_index_duplicates_total"), "batches heard already"),
                    ),
                ),
                Panel(
                    "Put right",
                    "cps",
                    (
                        Query(per_second("rachis_index_gaps_total"), "batches missing"),
                        Query(per_second("rachis_index_resyncs_total"), "snapshots taken in"),
                        Query(per_second("rachis_index_damaged_total"), "could not be read"),
                    ),
                ),
                Panel(
                    "Untrue claims that the last check found",
                    "none",
                    (Query(top_workers("rachis_index_untrue_claims"), "{{worker}}"),),
                ),
            ),
        ),
        Row(
            "Copies of hot prefixes",
            (
                Panel(
                    "Copies that are kept",
                    "none",
                    (Query(total("rachis_replication_copies"), "copies"),),
                    width=12,
                ),
                Panel(
                    "Copied",
                    "cps",
                    (
                        Query(per_second("rachis_replication_copies_total"), "copied"),
                        Query(per_second("rachis_replication_failed_total"), "came to nothing"),
                        Query(per_second("rachis_replication_given_up_total"), "cooled"),
                    ),
                    width=12,
                ),
            ),
        ),
    ),
)
