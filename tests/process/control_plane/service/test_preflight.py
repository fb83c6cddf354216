"""What is found wrong with nodes before a worker starts, from what they report and by asking this one."""

import asyncio
import re
import shutil
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster_configs.loading import load
from cluster_configs.preemption_costs import default_model
from cluster_configs.schema import RachisConfig
from cluster_core.errors import StartError
from cluster_core.ports import PortRange, free_ports
from cluster_core.versions import Versions, installed
from cluster_wire.redis_client import WRONG_PASSWORD
from cluster_wire.secret import read_secret, write_secret
from control_plane.service import preflight
from control_plane.service.embedded_redis import EmbeddedRedis
from control_plane.service.preflight import Reports, findings
from tests.fakes.redis_server import running_redis
from worker_runtime import own_node
from worker_runtime.node_report import (
    ModelFiles,
    NodeQuestion,
    NodeReport,
    cost_profile_report,
    report,
    secret_complaint,
)

HERE = Versions("0.7.2", "0.32.0", "1.5.1")
URL = "redis://:secret@10.1.0.1:6380/0"
GIB = 1 << 30
FINE = NodeReport(HERE, {"lo": ["127.0.0.1"], "eth0": ["10.1.0.4"]}, 64 * GIB, "", None, None)
MODEL = ModelFiles(digest="d1", weight_bytes=16 * GIB)


def config(**flags: Any) -> RachisConfig:
    return load(flags={name.replace("__", "."): value for name, value in flags.items()}).config


def found(reports: Reports, **flags: Any) -> list[str]:
    return list(findings(config(**flags), URL, HERE, reports))


def test_of_nodes_that_are_well_nothing_is_found() -> None:
    reports = {"a": FINE, "b": replace(FINE, model=MODEL, free_ports=7)}
    assert found(reports, pools__network="10.1.0.0/16", pools__ports="20000-20006", model__path="/models/m") == []


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (
            "No module named 'rachis'",
            "node b could not be asked what it has (No module named 'rachis'): see that it is well and has Rachis "
            "0.7.2 as this one, or take it out of the cluster",
        ),
        (
            replace(FINE, versions=Versions("0.8.0", "0.32.0", "1.5.1")),
            "Rachis is 0.8.0 on node b and 0.7.2 on the node of `rachis serve`: install the same on both and restart "
            "the node's Ray",
        ),
        (
            replace(FINE, secret_complaint="security.secret_file: /s cannot be read: No such file or directory"),
            "node b: security.secret_file: /s cannot be read: No such file or directory",
        ),
        (
            replace(FINE, redis_complaint="refuses the password"),
            "the Redis at redis://:***@10.1.0.1:6380/0 refuses the password when node b asks: correct the password in "
            "redis.url",
        ),
        (
            replace(FINE, redis_complaint="does not answer (no route)"),
            "the Redis at redis://:***@10.1.0.1:6380/0 does not answer (no route) when node b asks: open the way there "
            "from that node, or give another address in redis.url",
        ),
        (
            replace(FINE, free_ports=6),
            "only 6 ports of 20000-20010 are free on node b, a worker needs 7: end what listens there, or give "
            "pools.ports another range",
        ),
        (
            replace(FINE, model=ModelFiles(missing="there is no such folder")),
            "the model /models/m is not on node b: there is no such folder; copy it there, or correct model.path",
        ),
        (
            replace(FINE, model=MODEL, available_bytes=17 * GIB),
            "node b has 17.0 GiB of memory left, and a worker needs 24.0 GiB for weights and KV blocks: end what else "
            "runs there, or lower engine.kv_cache_gib",
        ),
        (
            replace(FINE, addresses={"lo": ["127.0.0.1"], "eth0": ["192.168.0.9"]}),
            "pools.network: node b has no address in 10.1.0.0/16, only 192.168.0.9 (eth0), 127.0.0.1 (lo); correct "
            "pools.network, or the addresses of that node",
        ),
    ],
)
def test_each_thing_that_is_wrong_is_told_with_its_node_and_what_to_do(said: NodeReport | str, sentence: str) -> None:
    told = found(
        {"a": FINE, "b": said},
        model__path="/models/m",
        pools__network="10.1.0.0/16",
        pools__ports="20000-20010",
        redis__url=URL,
        engine__kv_blocks=None,
        engine__kv_cache_gib=8,
    )
    assert told == [sentence]


def test_loopback_is_no_address_among_several_nodes() -> None:
    assert found({"a": FINE}, pools__network="127.0.0.0/8") == []
    told = found({"a": FINE, "b": FINE}, pools__network="127.0.0.0/8")
    assert [re.search(r"node (\w) would be reached under 127\.0\.0\.1", each)[1] for each in told] == ["a", "b"]  # type: ignore[index]


def test_models_that_differ_are_told_with_who_has_which() -> None:
    other = replace(MODEL, digest="d2")
    told = found({name: replace(FINE, model=other if name == "b" else MODEL) for name in "abc"}, model__path="~/m")
    assert told == [
        "the files in ~/m are not the same on all nodes: a, c (digest d1); b (digest d2); copy one model to all of them"
    ]


def test_a_gpu_worker_is_not_judged_by_the_memory_of_its_host() -> None:
    gpu = {
        "engine__device": "cuda",
        "engine__kv_buffer_device": "cuda",
        "pools__prefill__gpus_per_worker": 1,
        "pools__decode__gpus_per_worker": 1,
    }
    assert found({"a": replace(FINE, model=MODEL, available_bytes=GIB)}, **gpu) == []


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_redis(tmp_path_factory.mktemp("redis")) as url:
        yield url


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "a.safetensors").write_bytes(b"x" * 4096)
    (folder / "notes.md").write_text("not of the model")
    return folder


def files(folder: Path, url: str) -> ModelFiles:
    answer = report(NodeQuestion(url, str(folder), None, 7)).model
    assert answer is not None
    return answer


def test_this_node_reports_what_is_so(url: str, model: Path) -> None:
    first = next(port for port in range(21_000, 30_000, 9) if free_ports("0.0.0.0", PortRange(port, port + 8), 9) == 9)
    with socket.create_server(("127.0.0.1", first)), socket.create_server(("127.0.0.1", first + 2)):
        said = report(NodeQuestion(url, str(model), PortRange(first, first + 7), 7))

    assert said.versions == installed()
    assert "127.0.0.1" in said.addresses["lo"]
    assert said.available_bytes > 0
    assert said.redis_complaint == ""
    assert said.free_ports == 6
    assert said.model is not None and said.model.weight_bytes == 4096


def test_a_model_is_told_from_another_and_from_none(
    url: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = tmp_path / "copy"
    shutil.copytree(model, copied)
    (copied / "notes.md").write_text("others")
    assert files(copied, url) == files(model, url)
    # What `~` stands for is the environment's alone.
    monkeypatch.setenv("HOME", str(tmp_path))
    assert files(Path("~/model"), url) == files(model, url)

    (copied / "a.safetensors").write_bytes(b"x" * 4097)
    assert files(copied, url).digest != files(model, url).digest
    (model / "config.json").unlink()
    assert files(model, url).missing == "there is no config.json in it"
    assert files(tmp_path / "none", url).missing == "there is no such folder"


async def test_a_wrong_password_is_told_from_an_answer(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path)
    await server.start()
    place = server.url.partition("@")[2]
    try:
        told = [
            (await asyncio.to_thread(report, NodeQuestion(url, "builtin", None, 7))).redis_complaint
            for url in (server.url, f"redis://:wrong@{place}", f"redis://{place}", f"redis+cluster://:wrong@{place}")
        ]
    finally:
        await server.stop()
    assert told == ["", WRONG_PASSWORD, WRONG_PASSWORD, WRONG_PASSWORD]


def test_a_redis_that_is_not_there_is_told() -> None:
    said = report(NodeQuestion("redis://127.0.0.1:1/0", "builtin", None, 7))
    assert said.redis_complaint.startswith("does not answer (")


async def test_a_service_of_one_host_is_checked_on_it(url: str, tmp_path: Path) -> None:
    await preflight.check(config(), url)
    with pytest.raises(StartError) as refusal:
        await preflight.check(config(model__path=str(tmp_path / "gone"), pools__network="203.0.113.0/24"), url)

    first, second = str(refusal.value).splitlines()
    assert f"node {socket.gethostname()} has no address in 203.0.113.0/24" in first
    assert second.startswith(
        f"the model {tmp_path}/gone is not on node {socket.gethostname()}: there is no such folder"
    )


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "cannot be read: No such file or directory; copy the file of `rachis profile` there"),
        ("{", "is not JSON; copy"),
        ('{"metadata": {}}', "has none of the keys recomputation_latencies"),
        ('{"recomputation_latencies": {"16": [-1]}}', "recomputation_latencies.16: must be a list of milliseconds"),
    ],
)
async def test_a_cost_profile_that_no_prefill_worker_could_read_is_told_before_one_starts(
    url: str, tmp_path: Path, content: str | None, sentence: str
) -> None:
    path = tmp_path / "cost.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(StartError) as refusal:
        await preflight.check(config(streaming__cost_profile=str(path)), url)
    assert f"streaming.cost_profile: on node {socket.gethostname()} {path}" in str(refusal.value)
    assert sentence in str(refusal.value)


async def test_a_cost_profile_that_is_there_is_fine_and_a_relative_one_is_not(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    default_model("cpu").save(tmp_path / "cost.json")
    await preflight.check(config(streaming__cost_profile=str(tmp_path / "cost.json")), url)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StartError, match=r"^streaming\.cost_profile: cost\.json is looked for wherever a worker"):
        await preflight.check(config(streaming__cost_profile="cost.json"), url)


async def test_of_a_cost_profile_those_nodes_are_asked_that_may_prefill(url: str) -> None:
    asked: list[tuple[Any, bool]] = []

    async def ask(question: Any, about: NodeQuestion, *, prefills: bool = False) -> Any:
        asked.append((question, prefills))
        return await preflight.ask_here(question, about) if question is report else {}

    await preflight.check(config(streaming__cost_profile="/of/others/cost.json"), url, ask)
    await preflight.check(config(), url, ask)
    assert asked == [(report, False), (cost_profile_report, True), (report, False)]


def test_a_node_says_whether_it_has_the_services_secret(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for path in (here, there):
        write_secret(path)
    fingerprint = read_secret(here).fingerprint
    assert secret_complaint(str(here), fingerprint) == "" == secret_complaint(None, "")
    assert "is another one than that of `rachis serve`" in secret_complaint(str(there), fingerprint)
    assert "cannot be read: No such file" in secret_complaint(str(tmp_path / "none"), fingerprint)
    assert own_node.secret(str(here), fingerprint) is not None and own_node.secret(None, "") is None
    with pytest.raises(StartError, match=r"node .*: security\.secret_file: .* is another one"):
        own_node.secret(str(there), fingerprint)
