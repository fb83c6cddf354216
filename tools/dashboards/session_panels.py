"""The dashboard of streaming sessions: what computing a prompt before it is whole has brought."""

from tools.dashboards.expressions import per_second, quantile, ratio, total
from tools.dashboards.panel import Dashboard, Kind, Panel, Query, Row

_TOKENS = "rachis_session_tokens_sum"

SESSIONS = Dashboard(
    "sessions",
    "Rachis: sessions",
    "Streaming sessions: how soon they answer after their finish, and what became of the tokens they brought.",
    (
        Row(
            "Do they answer soon?",
            (
                Panel(
                    "Open now",
                    "none",
                    (Query(total("rachis_open_sessions"), "sessions"),),
                    Kind.NUMBER,
                    width=6,
                ),
                Panel(
                    "Time to first token that 90% keep",
                    "s",
                    (Query(quantile(0.9, "rachis_session_ttft_seconds", "since"), "since {{since}}"),),
                    Kind.NUMBER,
                    width=6,
                ),
                Panel(
                    "Prompt tokens that were invalidated",
                    "percentunit",
                    (
                        Query(
                            ratio(
                                per_second(f'{_TOKENS}{{outcome="invalidated"}}'),
                                per_second(f'{_TOKENS}{{outcome="received"}}'),
                            ),
                            "of those received",
                        ),
                    ),
                    Kind.NUMBER,
                    width=6,
                ),
                Panel(
                    "Messages refused",
                    "cps",
                    (Query(per_second("rachis_session_refusals_total"), "refused"),),
                    Kind.NUMBER,
                    width=6,
                ),
                Panel(
                    "Time to first token, half of all",
                    "s",
                    (Query(quantile(0.5, "rachis_session_ttft_seconds", "since"), "since {{since}}"),),
                    width=12,
                ),
                Panel(
                    "Time to first token, 99% of all",
                    "s",
                    (Query(quantile(0.99, "rachis_session_ttft_seconds", "since"), "since {{since}}"),),
                    width=12,
                ),
            ),
        ),
        Row(
            "What became of their tokens",
            (
                Panel(
                    "Prompt tokens",
                    "suffix: tokens/s",
                    (Query(per_second(_TOKENS, "outcome"), "{{outcome}}"),),
                    width=12,
                ),
                Panel(
                    "Prompt of a session, half of all",
                    "suffix: tokens",
                    (Query(quantile(0.5, "rachis_session_tokens", "outcome"), "{{outcome}}"),),
                    width=12,
                ),
            ),
        ),
        Row(
            "What happened to them",
            (
                Panel(
                    "Events, since the opening, half of all",
                    "s",
                    (Query(quantile(0.5, "rachis_session_event_seconds", "event"), "{{event}}"),),
                ),
                Panel(
                    "Events",
                    "cps",
                    (Query(per_second("rachis_session_event_seconds_count", "event"), "{{event}}"),),
                ),
                Panel(
                    "Preemptions",
                    "cps",
                    (Query(per_second("rachis_session_preemptions_total", "strategy"), "{{strategy}}"),),
                ),
                Panel(
                    "Messages refused, by status",
                    "cps",
                    (Query(per_second("rachis_session_refusals_total", "status"), "{{status}}"),),
                ),
            ),
        ),
    ),
)
