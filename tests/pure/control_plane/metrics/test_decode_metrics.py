"""How decode workers form their batches, in Prometheus."""

from rachis.v1 import admin_pb2 as admin
from rachis.v1 import worker_pb2 as wire

from control_plane.metrics.decode_metrics import decode_metrics

REPORT = wire.DecodeReport(
    policy="bandit",
    mode="fallback",
    running_requests=7,
    loading_requests=2,
    tip_tokens=3520,
    working_set_tokens=4096,
    waiting={"capacity": 4, "held": 3, "prefix": 1, "share": 2},
    steps=100,
    batch_sum=650,
    shared_tokens_sum=320_000,
    admissions={"idle": 1, "policy": 20, "overdue": 2},
    lost_tokens=640,
    wait_s={"capacity": 1.5, "held": 2.5, "prefix": 0.25, "share": 0.5},
    longest_held_s=0.75,
    decisions=31,
    decision_s=0.0125,
    probes=3,
    fallbacks=1,
)


def view(worker_id: str, report: wire.DecodeReport | None) -> admin.WorkerView:
    return admin.WorkerView(registration=wire.WorkerRegistration(worker_id=worker_id), decode=report)


def test_every_worker_with_a_report_has_samples_of_its_own() -> None:
    views = [view("decode-0", REPORT), view("decode-1", wire.DecodeReport()), view("prefill-0", None)]
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for metric in decode_metrics(views)
        for sample in metric.samples
    }

    assert {labels[1] for labels in found} == {"decode-0", "decode-1"}
    assert found["rachis_decode_steps_total", "decode-1"] == 0
    of_one = {(name.removeprefix("rachis_decode_"), *rest): value for (name, worker, *rest), value in found.items()
              if worker == "decode-0"}  # fmt: skip
    assert of_one == {
        ("mode", "policy"): 0,
        ("mode", "probe"): 0,
        ("mode", "fallback"): 1,
        ("policy_info", "bandit"): 1,
        ("batch_requests", "running"): 7,
        ("batch_requests", "loading"): 2,
        ("waiting_requests", "capacity"): 4,
        ("waiting_requests", "held"): 3,
        ("waiting_requests", "share"): 2,
        ("waiting_requests", "prefix"): 1,
        ("tip_tokens",): 3520,
        ("working_set_tokens",): 4096,
        ("steps_total",): 100,
        ("step_requests_total",): 650,
        ("step_shared_tokens_total",): 320_000,
        ("admissions_total", "idle"): 1,
        ("admissions_total", "policy"): 20,
        ("admissions_total", "overdue"): 2,
        ("lost_tokens_total",): 640,
        ("wait_seconds_total", "capacity"): 1.5,
        ("wait_seconds_total", "held"): 2.5,
        ("wait_seconds_total", "share"): 0.5,
        ("wait_seconds_total", "prefix"): 0.25,
        ("longest_held_seconds",): 0.75,
        ("decisions_total",): 31,
        ("decision_seconds_total",): 0.0125,
        ("probes_total",): 3,
        ("fallbacks_total",): 1,
    }
