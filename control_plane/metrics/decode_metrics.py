"""How decode workers form their batches, for Prometheus; see `control_plane.metrics.worker_figures`.

Means are ratios of rates: the batch size is that of `rachis_decode_step_requests_total` to that of
`rachis_decode_steps_total`, and so are the shared tokens of a batch and the time of a decision.
"""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import worker_pb2 as wire

from control_plane.metrics.worker_figures import Figure, metrics_of

MODES = ("policy", "probe", "fallback")

_FIGURES: tuple[Figure[wire.DecodeReport], ...] = (
    Figure(
        GaugeMetricFamily,
        "rachis_decode_mode",
        "1 for what decides who joins the batch: the policy, or order of arrival in a probe or as a fallback",
        "mode",
        lambda report: {mode: float(mode == report.mode) for mode in MODES},
    ),
    Figure(
        GaugeMetricFamily,
        "rachis_decode_policy_info",
        "1 for the stop policy that is configured",
        "policy",
        lambda report: {report.policy: 1.0},
    ),
    Figure(
        GaugeMetricFamily,
        "rachis_decode_batch_requests",
        "Requests of the batch: those that run, and those whose KV is on its way",
        "state",
        lambda report: {"running": report.running_requests, "loading": report.loading_requests},
    ),
    Figure(
        GaugeMetricFamily,
        "rachis_decode_waiting_requests",
        "Requests that wait to join the batch, by what keeps them waiting",
        "cause",
        lambda report: report.waiting,
    ),
    Figure(
        GaugeMetricFamily,
        "rachis_decode_tip_tokens",
        "Length of the prefix that the whole cohort shares",
        None,
        lambda report: report.tip_tokens,
    ),
    Figure(
        GaugeMetricFamily,
        "rachis_decode_working_set_tokens",
        "Prompt tokens of the cohort, each shared prefix counted once",
        None,
        lambda report: report.working_set_tokens,
    ),
    Figure(
        CounterMetricFamily,
        "rachis_decode_steps_total",
        "Engine steps that had a batch",
        None,
        lambda report: report.steps,
    ),
    Figure(
        CounterMetricFamily,
        "rachis_decode_step_requests_total",
        "Requests of the batch, added up over steps",
        None,
        lambda report: report.batch_sum,
    ),
    Figure(
        CounterMetricFamily,
        "rachis_decode_step_shared_tokens_total",
        "Tokens of the prefix that the cohort shared, added up over steps",
        None,
        lambda report: report.shared_tokens_sum,
    ),
    Figure(
        CounterMetricFamily,
        "rachis_decode_admissions_total",
        "Requests that joined the batch, by why they did",
        "reason",
        lambda report: report.admissions,
    ),
    Figure(
        CounterMetricFamily,
        "rachis_decode_lost_tokens_total",
        "Tokens by which admissions shortened the prefix that the batch shares",
        None,
        lambda report: report.lost_tokens,
    ),
    Figure(
        CounterMetricFamily,
        "rachis_decode_wait_seconds_total",
        "Time that admitted requests had waited, by what kept them waiting",
        "cause",
        lambda report: report.wait_s,
    ),
    Figure(
        GaugeMetricFamily,
        "rachis_decode_longest_held_seconds",
        "The longest that the policy kept a request waiting since the worker started",
        None,
        lambda report: report.longest_held_s,
    ),
    Figure(
        CounterMetricFamily,
        "rachis_decode_decisions_total",
        "Decisions of the policy",
        None,
        lambda report: report.decisions,
    ),
    Figure(
        CounterMetricFamily,
        "rachis_decode_decision_seconds_total",
        "Time that it took to plan who joins the batch, steps without a decision included",
        None,
        lambda report: report.decision_s,
    ),
    Figure(
        CounterMetricFamily,
        "rachis_decode_probes_total",
        "Measurements against order of arrival",
        None,
        lambda report: report.probes,
    ),
    Figure(
        CounterMetricFamily,
        "rachis_decode_fallbacks_total",
        "Measurements that found order of arrival to be faster",
        None,
        lambda report: report.fallbacks,
    ),
)


def decode_metrics(views: Iterable[admin.WorkerView]) -> list[Metric]:
    """Of all workers with a decode report."""
    return metrics_of(_FIGURES, {view.registration.worker_id: view.decode for view in views if view.HasField("decode")})
