"""What the environment of an engine says: ports of vLLM, NIXL and UCX that are free, spans, the model runner."""

import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import pytest

from cluster_configs.schema import EngineSection, RachisConfig, TracingSection
from cluster_core.errors import StartError
from cluster_core.ports import PortRange, free_ports
from worker_runtime.engine_settings import EngineRole, EngineSettings, engine_environment, ports_needed

HOST = "127.0.0.1"


def settings(host: str = HOST, ports: PortRange | None = None, engine: EngineSection | None = None) -> EngineSettings:
    config = RachisConfig()
    return EngineSettings(
        config.model, engine or config.engine, config.handoff, EngineRole.PREFILL, host=host, ports=ports
    )


@pytest.fixture
def ports() -> Iterator[PortRange]:
    """Seven free ports of loopback: what one worker needs."""
    first = next(port for port in range(21_001, 30_000, 7) if free_ports(HOST, PortRange(port, port + 6), 7) == 7)
    yield PortRange(first, first + 6)


def test_all_ports_of_a_worker_lie_in_its_range(ports: PortRange) -> None:
    assert ports_needed(EngineSection()) == len(ports)
    variables = engine_environment(settings(ports=ports))

    assert int(variables["VLLM_NIXL_SIDE_CHANNEL_PORT"]) in ports
    assert variables["UCX_TCP_PORT_RANGE"] == str(ports)
    assert variables["VLLM_NIXL_SIDE_CHANNEL_HOST"] == HOST
    assert "UCX_TCP_PORT_RANGE" not in engine_environment(settings())


def test_an_engine_sends_its_own_spans_as_the_router_sends_its_traces() -> None:
    tracing = TracingSection(otlp_endpoint="http://127.0.0.1:4318", otlp_protocol="http", timeout_s=2)
    variables = engine_environment(replace(settings(), tracing=tracing))
    assert variables["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] == "http/protobuf"
    assert variables["OTEL_EXPORTER_OTLP_TRACES_TIMEOUT"] == "2.0"
    assert not any(name.startswith("OTEL_") for name in engine_environment(settings()))


@pytest.mark.parametrize(
    ("device", "runner", "told"),
    [("cpu", None, None), ("cpu", "v1", "0"), ("cpu", "v2", "1"), ("cuda", None, "0"), ("cuda", "v2", "1")],
)
def test_a_gpu_has_v1_of_vllms_model_runners_unless_it_is_told_otherwise(
    device: Literal["cpu", "cuda"], runner: Literal["v1", "v2"] | None, told: str | None
) -> None:
    engine = EngineSection(device=device, kv_buffer_device=device, model_runner=runner)
    assert engine_environment(settings(engine=engine)).get("VLLM_USE_V2_MODEL_RUNNER") == told


def test_a_range_without_room_for_ucx_is_refused_because_ucx_would_look_for_ever(ports: PortRange) -> None:
    refusal = pytest.raises(StartError, match=r"^pools\.ports: only 4 ports of .* are free .*, UCX needs 5: give each")
    with socket.create_server((HOST, ports.first)), socket.create_server((HOST, ports.last)), refusal:
        engine_environment(settings(ports=ports))
