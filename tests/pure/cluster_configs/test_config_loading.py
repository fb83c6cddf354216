"""How a configuration in force comes together: precedence with sources, and refusals that help."""

import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from cluster_configs.loading import (
    DEFAULT_PROFILE,
    LoadedConfig,
    load,
    parse_assignments,
    profile_names,
    tree_of,
)
from cluster_configs.schema import ObjectivesSection, RachisConfig, TracingSection
from cluster_core.errors import ConfigError

PORT_VARIABLE = {"RACHIS_ROUTER__PORT": "7003"}


def entry(loaded: LoadedConfig, key: str) -> tuple[Any, str]:
    [found] = [entry for entry in loaded.entries if entry.key == key]
    return found.value, found.source


@pytest.fixture
def port_file(tmp_path: Path) -> Path:
    path = tmp_path / "rachis.yaml"
    path.write_text("router:\n  port: 7002\n")
    return path


def profiles(folder: Path, text: str) -> Path:
    """A folder with the default profile alone."""
    (folder / f"{DEFAULT_PROFILE}.yaml").write_text(text)
    return folder


def test_a_default_is_in_force_when_no_layer_sets_it() -> None:
    assert entry(load(), "router.port") == (7421, "default")


def test_each_layer_wins_over_the_one_below_and_is_named_as_source(port_file: Path, tmp_path: Path) -> None:
    flags = {"router.port": 7004}
    loaded_over = partial(load, profiles=profiles(tmp_path, "router: {port: 7001}"))

    assert entry(loaded_over(), "router.port") == (7001, "profile")
    assert entry(loaded_over(file=port_file), "router.port") == (7002, "file")
    assert entry(loaded_over(file=port_file, environment=PORT_VARIABLE), "router.port") == (7003, "environment")
    loaded = loaded_over(file=port_file, environment=PORT_VARIABLE, flags=flags)
    assert entry(loaded, "router.port") == (7004, "flag")
    assert loaded.config.router.port == 7004


def test_layers_that_set_different_keys_of_a_section_are_both_in_force(port_file: Path) -> None:
    loaded = load(file=port_file, environment={"RACHIS_ROUTER__HOST": "0.0.0.0"})

    assert (loaded.config.router.port, loaded.config.router.host) == (7002, "0.0.0.0")


def test_every_key_of_the_schema_has_one_entry() -> None:
    loaded = load()
    keys = [entry.key for entry in loaded.entries]

    assert len(keys) == len(set(keys))
    assert tree_of({entry.key: entry.value for entry in loaded.entries}) == loaded.config.model_dump(mode="json")


@pytest.mark.parametrize("profile", profile_names())
def test_every_profile_loads(profile: str) -> None:
    assert load(profile=profile).config


def test_the_profile_comes_from_argument_over_environment_over_default() -> None:
    environment = {"RACHIS_PROFILE": "cpu-local-2x2"}

    assert load(environment=environment).config.pools.prefill.workers == 2
    assert load(profile="gpu-1node", environment=environment).config.engine.device == "cuda"
    assert load().config.pools.prefill.workers == 1


def test_the_file_may_be_named_by_the_environment(port_file: Path) -> None:
    assert load(environment={"RACHIS_CONFIG": str(port_file)}).config.router.port == 7002


def test_variables_that_are_no_configuration_are_left_alone() -> None:
    load(environment={"RACHIS_STATE_DIR": "/x", "RACHIS_SERVICE": "svc-1", "HOME": "/root"})


def test_an_unknown_key_in_a_file_is_refused_with_the_nearest(tmp_path: Path) -> None:
    path = tmp_path / "rachis.yaml"
    path.write_text("router: {prot: 1}\n")

    with pytest.raises(ConfigError, match=r"^router\.prot: .*from the file.*did you mean `router\.port`"):
        load(file=path)


def test_an_unknown_variable_is_refused_with_the_nearest_key() -> None:
    with pytest.raises(ConfigError, match=r"^router\.prot: .*from the environment.*did you mean `router\.port`"):
        load(environment={"RACHIS_ROUTER__PROT": "1"})


def test_an_unknown_flag_is_refused_with_the_nearest_key() -> None:
    with pytest.raises(ConfigError, match=r"^router\.prot: .*from the flag.*did you mean `router\.port`"):
        load(flags={"router.prot": 1})


def test_an_unknown_key_in_a_profile_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^router\.prot: .*from the profile.*did you mean `router\.port`"):
        load(profiles=profiles(tmp_path, "router: {prot: 1}"))


def test_a_key_without_its_section_is_refused_with_the_whole_key() -> None:
    with pytest.raises(ConfigError, match=r"did you mean `engine\.tensor_parallel_size`"):
        load(flags={"tensor_parallel_size": 2})


def test_an_unknown_profile_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"^profile: unknown profile `cpu-locl`; did you mean `cpu-local`"):
        load(profile="cpu-locl")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("router.port", 65_536),
        ("router.port", "many"),
        ("router.queue_timeout_s", 0),
        ("engine.device", "tpu"),
        ("pools.decode.workers", -1),
        ("log_level", "LOUD"),
        ("handoff.lease_s", 5),
        ("engine.kv_cache_gib", -1),
        ("engine.kv_cache_memory_gib", 0),
        ("engine.hf_overrides", "[1]"),
        ("engine.hf_overrides", "{"),
        ("engine.vllm", ["max_loras"]),
        ("engine.vllm", ["=1"]),
        ("engine.vllm", ["a=[1"]),
        ("engine.vllm", ["a=1", "a=2"]),
        ("tiers.formula", "hotness + 1"),
        ("tiers.eviction", "coldest"),
        ("tiers.host_ratio", -0.5),
        ("decode.policy", "lifo"),
        ("decode.chunk_tokens", 0),
        ("decode.chunk_tokens", 65_537),
        ("decode.wait_bound_s", 0),
        ("decode.policy_folder", ""),
    ],
)
def test_a_bad_value_is_refused_with_its_key_the_value_and_its_layer(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=r"from the flag") as caught:
        load(flags={key: value})

    assert caught.value.field == key
    assert repr(value) in str(caught.value)


def test_no_number_is_infinite_or_none_at_all() -> None:
    numbers = {entry.key for entry in load().entries if isinstance(entry.value, float)}
    assert {"engine.kv_cache_gib", "pools.decode.cpus_per_worker", "pools.prefill.gpus_per_worker"} <= numbers
    for key in numbers | {"engine.kv_cache_memory_gib", "tiers.host_ratio"}:
        for value in (math.inf, -math.inf, math.nan):
            with pytest.raises(ValidationError, match=re.escape(key)):
                RachisConfig.model_validate(tree_of({key: value}))


def test_a_service_whose_workers_do_both_has_that_pool_alone() -> None:
    both, separate = load(profile="cpu-shared").config.pools, load().config.pools
    assert {name: pool.workers for name, pool in both.in_use.items()} == {"shared": 2}
    assert list(separate.in_use) == ["prefill", "decode"]


@pytest.mark.parametrize(
    ("workers", "says"),
    [
        (
            (1, 1, 2),
            "pools: shared.workers is 2, so prefill.workers and decode.workers must be 0, got 1 and 1: workers",
        ),
        ((0, 1, 2), "must be 0, got 0 and 1"),
        ((1, 0, 0), "pools: decode.workers must be at least 1, without a decode worker nothing is served"),
        ((0, 0, 0), "pools: decode.workers must be at least 1"),
    ],
)
def test_pools_that_do_not_fit_together_are_refused(workers: tuple[int, int, int], says: str) -> None:
    names = ("prefill", "decode", "shared")
    with pytest.raises(ConfigError, match=re.escape(says)):
        load(flags={f"pools.{name}.workers": number for name, number in zip(names, workers, strict=True)})


@pytest.mark.parametrize("flags", [{}, {"objectives.tpot_s": 0.05}, {"profile": "cpu-shared"}])
def test_placement_by_the_objectives_needs_workers_that_do_both_and_both_objectives(flags: dict[str, Any]) -> None:
    profile = flags.pop("profile", None)
    with pytest.raises(ConfigError, match=r"needs pools\.shared\.workers and objectives\.tpot_s above 0"):
        load(profile=profile, flags={**flags, "placement.policy": "objectives"})
    load(profile="cpu-shared", flags={"objectives.tpot_s": 0.05, "placement.policy": "objectives"})


@pytest.mark.parametrize(
    ("profile", "flags", "policy"),
    [
        ("cpu-shared", {"objectives.tpot_s": 0.05}, "objectives"),
        ("cpu-shared", {}, "hotness"),
        (None, {"objectives.tpot_s": 0.05}, "hotness"),
        ("cpu-shared", {"objectives.tpot_s": 0.05, "placement.disaggregation": "always"}, "hotness"),
        ("cpu-shared", {"objectives.tpot_s": 0.05, "placement.policy": "hotness"}, "hotness"),
        (None, {"placement.policy": "random"}, "random"),
    ],
)
def test_workers_that_do_both_are_placed_by_the_objectives_that_are_set(
    profile: str | None, flags: dict[str, Any], policy: str
) -> None:
    assert load(profile=profile, flags=flags).config.placement_policy == policy


def test_gpus_are_asked_for_of_the_pools_in_use_alone() -> None:
    flags = {"pools.shared.workers": 2, "pools.prefill.workers": 0, "pools.decode.workers": 0}
    with pytest.raises(ConfigError, match=r"pools\.shared\.gpus_per_worker must be above 0"):
        load(profile="gpu-1node", flags=flags)
    load(profile="gpu-1node", flags={**flags, "pools.shared.gpus_per_worker": 1})


def test_a_deadline_beyond_half_the_lease_is_refused() -> None:
    assert load(flags={"handoff.lease_s": 30, "handoff.deadline_s": 15}).config.handoff.deadline_s == 15
    with pytest.raises(ConfigError, match=r"^handoff: deadline_s must be at most 15, half of lease_s"):
        load(flags={"handoff.lease_s": 30, "handoff.deadline_s": 15.1})


def test_memory_of_a_gpu_is_refused_on_a_cpu() -> None:
    with pytest.raises(ConfigError, match="kv_cache_memory_gib is for GPUs, a CPU has kv_cache_gib"):
        load(flags={"engine.kv_cache_memory_gib": 2.0})


def test_blocks_that_a_cpu_cannot_have_are_refused() -> None:
    with pytest.raises(ConfigError, match="multiple of 32 on a CPU"):
        load(flags={"engine.block_size_tokens": 16})
    with pytest.raises(ConfigError, match="kv_buffer_device must be cpu"):
        load(flags={"engine.kv_buffer_device": "cuda"})
    with pytest.raises(ConfigError, match="kv_buffer_device must be cuda"):
        load(profile="gpu-1node", flags={"engine.kv_buffer_device": "cpu"})


@pytest.mark.parametrize(
    ("text", "message"), [("router: [", "is not valid YAML"), ("- 1\n- 2\n", "must be a table of sections")]
)
def test_a_file_that_is_no_table_of_sections_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "rachis.yaml"
    path.write_text(text)

    with pytest.raises(ConfigError, match=rf"rachis\.yaml: {message}"):
        load(file=path)


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    path = tmp_path / "rachis.yaml"
    path.write_text("# nothing\n")

    assert load(file=path) == load()


def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\xff")
    for name in ("missing.yaml", "binary.yaml"):
        with pytest.raises(ConfigError, match=rf"{name}: cannot be read"):
            load(file=tmp_path / name)


def test_assignments_are_read_as_yaml() -> None:
    parsed = parse_assignments(["a.b=1", "c = true", "d=null", "e=x=y"])

    assert parsed == {"a.b": 1, "c": True, "d": None, "e": "x=y"}


def test_an_assignment_without_equals_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"`router\.port` is not of the form key=value"):
        parse_assignments(["router.port"])


@pytest.mark.parametrize("layer", ["environment", "flag"])
def test_a_value_that_is_not_valid_yaml_is_refused_as_configuration(layer: str) -> None:
    with pytest.raises(ConfigError):
        if layer == "environment":
            load(environment={"RACHIS_MODEL__NAME": "[unclosed"})
        else:
            parse_assignments(["model.name=[unclosed"])


def test_an_assignment_of_null_sets_null() -> None:
    loaded = load(flags=parse_assignments(["engine.kv_blocks=null"]))

    assert loaded.config.engine.kv_blocks is None


def test_the_configuration_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load().config.router.port = 1  # type: ignore[misc]


@pytest.mark.parametrize("url", ["reddis://:hush@10.0.0.1:6379/0", "redis//:hush@10.0.0.1/0", "redis:/:hush@h"])
def test_a_password_is_not_repeated_in_what_is_said_of_a_url(url: str) -> None:
    with pytest.raises(ConfigError, match=r"redis\.url.*from the flag") as caught:
        load(flags={"redis.url": url})
    assert "hush" not in str(caught.value)


IMITATED = {"engine.device": "imitated", "engine.cost_model": "h100-llama-3.1-8b", "model.name": "imitated-model"}


def test_an_imitated_gpu_is_one_of_a_cost_model() -> None:
    assert load(flags=IMITATED).config.engine.cost_model == "h100-llama-3.1-8b"
    for wrong in ({"engine.cost_model": None}, {"engine.device": "cpu"}):
        with pytest.raises(ConfigError, match="cost_model is given where device is imitated, and nowhere else"):
            load(flags={**IMITATED, **wrong})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model.name", "llama", "model.name must begin with imitated-"),
        ("lora.max_loaded", 1, "no weights to adapt"),
        ("engine.tensor_parallel_size", 2, "the cost model says how many GPUs"),
        ("engine.kv_cache_memory_gib", 1.0, "kv_blocks or its cost model's memory"),
        ("engine.block_size_tokens", 16, "multiple of 32"),
        ("engine.kv_buffer_device", "cuda", "kv_buffer_device must be cpu"),
        ("engine.model_runner", "v2", "model_runner is of a device that computes"),
    ],
)
def test_what_an_imitated_gpu_cannot_be_is_refused(key: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(flags={**IMITATED, key: value})


def test_engines_go_by_objectives_that_bound_their_steps_and_by_no_others() -> None:
    assert ObjectivesSection(ttft_s=2.0).for_engines == ObjectivesSection()
    assert ObjectivesSection(ttft_s=2.0, tpot_s=0.05).for_engines == ObjectivesSection(ttft_s=2.0, tpot_s=0.05)


@pytest.mark.parametrize(
    ("endpoint", "protocol", "url"),
    [
        (None, "http", None),
        ("http://c:4317", "grpc", "http://c:4317"),
        ("http://c:4318", "http", "http://c:4318/v1/traces"),
        ("http://c:4318/", "http", "http://c:4318/v1/traces"),
        ("https://c/own/path", "http", "https://c/own/path"),
    ],
)
def test_traces_go_where_the_endpoint_says_over_http_with_the_usual_path(
    endpoint: str | None, protocol: str, url: str | None
) -> None:
    section = load(flags={"tracing.otlp_endpoint": endpoint, "tracing.otlp_protocol": protocol}).config.tracing
    assert section.otlp_url == url


def test_what_the_router_alone_does_with_traces_ends_no_engine() -> None:
    sent = TracingSection(otlp_endpoint="http://c:4317", timeout_s=2)
    assert sent.model_copy(update={"sample_rate": 0.5, "memory_mib": 3}).for_engines == sent
    assert TracingSection(timeout_s=2, sample_rate=0.5).for_engines == TracingSection()
