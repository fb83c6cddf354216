"""The dashboard that is opened first: does it answer, how soon, and what is in the way."""

from tools.dashboards.expressions import largest, per_second, quantile, ratio, total, workers_per_second
from tools.dashboards.panel import Dashboard, Kind, Panel, Query, Row

_FAILED = 'rachis_requests_total{outcome=~"failed|expired"}'
_FIRING = 'ALERTS{alertname=~"Rachis.+",alertstate="firing"}'


def _kept(what: str) -> tuple[Query, ...]:
    """Of "ttft" or "tpot", by class."""
    measured, objective = f"rachis_request_{what}_seconds", f"rachis_objective_{what}_seconds"
    kept = (Query(quantile(each, measured, "class"), f"{each:.0%} keep, {{{{class}}}}") for each in (0.5, 0.9, 0.99))
    return (*kept, Query(largest(objective, "class"), "objective for 90%, {{class}}"))


SERVICE = Dashboard(
    "service",
    "Rachis: service",
    "Begin here. Alerts that fire and six numbers say whether it is well; below stands what is in the way.",
    (
        Row(
            "Is it well?",
            (
                Panel(
                    "Alerts that fire",
                    "none",
                    (
                        Query(
                            f"max by (severity, alertname, instance, pool, worker, node) ({_FIRING})",
                            "{{alertname}}",
                        ),
                    ),
                    Kind.TABLE,
                    width=12,
                    about="Alerts of cluster_configs/alerts that fire now, of all services, each with its runbook.",
                ),
                Panel(
                    "Requests failed or expired",
                    "percentunit",
                    (Query(ratio(per_second(_FAILED), per_second("rachis_requests_total")), "share"),),
                    Kind.NUMBER,
                    width=4,
                    red_from=0.02,
                ),
                Panel(
                    "TTFT that 90% keep",
                    "s",
                    (
                        Query(quantile(0.9, "rachis_request_ttft_seconds", "class"), "{{class}}"),
                        Query(largest("rachis_objective_ttft_seconds", "class"), "objective, {{class}}"),
                    ),
                    Kind.NUMBER,
                    width=4,
                ),
                Panel(
                    "Requests",
                    "reqps",
                    (Query(per_second("rachis_requests_total"), "ended"),),
                    Kind.NUMBER,
                    width=4,
                ),
                Panel(
                    "Workers that may get requests",
                    "none",
                    (
                        Query(
                            "sum by (pool) (max by (pool, worker) (rachis_worker_usable))",
                            "{{pool}}",
                        ),
                    ),
                    Kind.NUMBER,
                    width=4,
                    red_below=1,
                ),
                Panel(
                    "Requests that wait for a slot",
                    "none",
                    (Query(total("rachis_router_queued_requests"), "waiting"),),
                    Kind.NUMBER,
                    width=4,
                ),
                Panel(
                    "Redis answers",
                    "none",
                    (Query("min (rachis_registry_connected)", "1: at every router"),),
                    Kind.NUMBER,
                    width=4,
                    red_below=1,
                ),
            ),
        ),
        Row(
            "Requests",
            (
                Panel(
                    "Time to first token",
                    "s",
                    _kept("ttft"),
                    width=12,
                ),
                Panel(
                    "Time for each token after the first",
                    "s",
                    _kept("tpot"),
                    width=12,
                ),
                Panel(
                    "Requests by how they ended",
                    "reqps",
                    (Query(per_second("rachis_requests_total", "outcome"), "{{outcome}}"),),
                    width=12,
                ),
                Panel(
                    "Errors by gRPC status",
                    "cps",
                    (Query(per_second("rachis_request_errors_total", "status"), "{{status}}"),),
                ),
                Panel(
                    "Slots and queue",
                    "none",
                    (
                        Query(total("rachis_router_in_flight_requests"), "have a slot"),
                        Query(total("rachis_router_max_in_flight_requests"), "slots"),
                        Query(total("rachis_router_queued_requests"), "wait"),
                        Query(total("rachis_router_max_queued_requests"), "may wait"),
                    ),
                ),
                Panel(
                    "Hand-offs by what came of them",
                    "cps",
                    (Query(per_second("rachis_handoffs_total", "outcome"), "{{outcome}}"),),
                ),
                Panel(
                    "Answers that went on elsewhere",
                    "cps",
                    (
                        Query(per_second("rachis_migrations_total"), "at another worker"),
                        Query(per_second("rachis_resumed_requests_total"), "at another router"),
                        Query(per_second("rachis_calls_moved_total"), "away from a worker that hangs"),
                    ),
                ),
                Panel(
                    "Prefilled where, and why",
                    "reqps",
                    (Query(per_second("rachis_disaggregation_decisions_total", "reason"), "{{reason}}"),),
                ),
                Panel(
                    "Clients and callers refused",
                    "cps",
                    (
                        Query(per_second("rachis_slow_readers_total"), "did not read"),
                        Query(per_second("rachis_refused_calls_total", "reason"), "{{reason}}"),
                    ),
                ),
                Panel(
                    "Tenants that have had their rate",
                    "cps",
                    (
                        Query(per_second("rachis_rate_refusals_total", "limit"), "refused: {{limit}}"),
                        Query(per_second("rachis_rate_requests_apart_total"), "without Redis"),
                    ),
                ),
                Panel(
                    "Tenants below their burst",
                    "none",
                    (Query(total("rachis_rate_tenants", "instance"), "{{instance}}"),),
                ),
                Panel(
                    "Poisoned requests",
                    "none",
                    (Query(total("rachis_poisoned_requests"), "refused"),),
                ),
            ),
        ),
        Row(
            "Routers",
            (
                Panel(
                    "Held up by own work, 99%",
                    "s",
                    (Query(quantile(0.99, "rachis_router_loop_stall_seconds", "instance"), "{{instance}}"),),
                ),
                Panel(
                    "Event loop late, 99%",
                    "s",
                    (Query(quantile(0.99, "rachis_router_loop_late_seconds", "instance"), "{{instance}}"),),
                ),
                Panel(
                    "Tasks",
                    "none",
                    (Query(total("rachis_router_tasks", "instance"), "{{instance}}"),),
                ),
                Panel(
                    "Memory that clients fill, of its limit",
                    "percentunit",
                    (
                        Query(
                            ratio(
                                largest("rachis_router_memory_bytes", "what"),
                                largest("rachis_router_memory_limit_bytes", "what"),
                            ),
                            "{{what}}",
                        ),
                    ),
                ),
                Panel(
                    "Redis answers, by router",
                    "none",
                    (Query(largest("rachis_registry_connected", "instance"), "{{instance}}"),),
                ),
                Panel(
                    "Versions",
                    "none",
                    (Query("count by (version) (rachis_build_info)", "{{version}}"),),
                ),
                Panel(
                    "Traces",
                    "cps",
                    (
                        Query(per_second("rachis_traces_exported_total"), "exported"),
                        Query(per_second("rachis_traces_dropped_total", "reason"), "dropped: {{reason}}"),
                    ),
                ),
                Panel(
                    "Lines of logs lost",
                    "cps",
                    (
                        Query(per_second("rachis_router_log_lines_lost_total"), "routers"),
                        Query(workers_per_second("rachis_worker_log_lines_lost_total"), "workers"),
                    ),
                ),
                Panel(
                    "Consoles",
                    "none",
                    (Query(total("rachis_console_streams"), "streams"),),
                ),
                Panel(
                    "Consoles' streams that ended or did not begin",
                    "cps",
                    (
                        Query(per_second("rachis_console_slow_readers_total"), "did not read"),
                        Query(per_second("rachis_console_refused_streams_total"), "too many"),
                    ),
                ),
            ),
        ),
        Row(
            "Gateways",
            (
                Panel(
                    "WebSocket connections",
                    "none",
                    (Query(total("rachis_gateway_websocket_connections", "instance"), "{{instance}}"),),
                ),
                Panel(
                    "Sessions of WebSockets",
                    "cps",
                    (Query(per_second("rachis_gateway_sessions_total", "outcome"), "{{outcome}}"),),
                ),
                Panel(
                    "Stored responses",
                    "cps",
                    (Query(per_second("rachis_gateway_stored_responses_total", "outcome"), "{{outcome}}"),),
                ),
            ),
        ),
    ),
)
