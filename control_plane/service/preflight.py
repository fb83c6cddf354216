"""Before the first worker starts: what on any of the nodes would keep it from starting, or from being right.

Each node that could run a worker reports on itself (`worker_runtime.node_report`); `findings` is pure and says what is
wrong, where, and what to do about it.
"""

import asyncio
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol, TypeVar

from cluster_configs.loading import masked
from cluster_configs.schema import RachisConfig
from cluster_core import versions
from cluster_core.errors import StartError
from cluster_core.ports import PortRange
from cluster_core.versions import Versions, differences
from cluster_wire.redis_client import WRONG_PASSWORD
from cluster_wire.secret import fingerprint_of
from worker_runtime.addresses import own_address
from worker_runtime.engine_settings import ports_needed
from worker_runtime.node_report import CostProfileReport, NodeQuestion, NodeReport, cost_profile_report, report

_GIB = 1 << 30

# By the name of the node: its report, or in words why there is none.
Reports = Mapping[str, NodeReport | str]
CostProfileReports = Mapping[str, CostProfileReport | str]
_Report = TypeVar("_Report")


class Ask(Protocol):
    """Has a question answered by every node that may run a worker; prefills: one that prefills prompts of others."""

    async def __call__(
        self, question: Callable[[NodeQuestion], _Report], about: NodeQuestion, *, prefills: bool = False
    ) -> Mapping[str, _Report | str]: ...


async def ask_here(
    question: Callable[[NodeQuestion], _Report], about: NodeQuestion, *, prefills: bool = False
) -> Mapping[str, _Report | str]:
    """In place of a Ray cluster of one node, this one."""
    return {socket.gethostname(): await asyncio.to_thread(question, about)}


async def check(config: RachisConfig, redis_url: str, ask: Ask = ask_here) -> None:
    """Raises StartError with all that was found."""
    about = _question(config, redis_url)
    found = list(findings(config, redis_url, versions.installed(), await ask(report, about)))
    if about.cost_profile is not None:
        found += cost_profile_findings(about.cost_profile, await ask(cost_profile_report, about, prefills=True))
    if found:
        raise StartError("\n".join(found))


def findings(config: RachisConfig, redis_url: str, here: Versions, reports: Reports) -> Iterator[str]:
    """A sentence for each thing that is wrong. here: the versions of this node."""
    answered = {}
    for node, answer in sorted(reports.items()):
        if isinstance(answer, str):
            yield (
                f"node {node} could not be asked what it has ({answer}): see that it is well and has Rachis "
                f"{here.rachis} as this one, or take it out of the cluster"
            )
        else:
            answered[node] = answer
    for node, each in answered.items():
        skew = differences(each.versions, f"node {node}", here, "the node of `rachis serve`")
        if skew:
            yield f"{', '.join(skew)}: install the same on both and restart the node's Ray"
        if each.secret_complaint:
            yield f"node {node}: {each.secret_complaint}"
        yield from _of_addresses(config, node, each, len(reports))
        yield from _of_redis(config, redis_url, node, each)
        yield from _of_ports(config, node, each)
        yield from _of_model(config, node, each)
    yield from _of_models(config, answered)


def cost_profile_findings(path: str, reports: CostProfileReports) -> Iterator[str]:
    """Likewise, of the file that prefill workers read. One that does not answer is told of by `findings`."""
    if not Path(path).is_absolute():
        yield (
            f"streaming.cost_profile: {path} is looked for wherever a worker happens to run: give an absolute path, "
            "as `rachis profile` prints it"
        )
        return
    for node, said in sorted(reports.items()):
        if isinstance(said, CostProfileReport) and said.complaint:
            yield (
                f"streaming.cost_profile: on node {node} {said.complaint}; copy the file of `rachis profile` there, or "
                "take the setting back"
            )


def _question(config: RachisConfig, redis_url: str) -> NodeQuestion:
    ports = PortRange.parse(config.pools.ports) if config.pools.ports is not None else None
    secret = config.security.secret_path
    needed = ports_needed(config.engine)
    profile = config.streaming.cost_profile
    return NodeQuestion(redis_url, config.model.path, ports, needed, secret, fingerprint_of(secret), profile)


def _of_addresses(config: RachisConfig, node: str, said: NodeReport, nodes: int) -> Iterator[str]:
    """Without a network the address is Ray's, which Ray itself would not have got this far with."""
    if config.pools.network is not None:
        try:
            own_address(config.pools.network, "", nodes, said.addresses, node)
        except StartError as error:
            yield str(error)


def _of_redis(config: RachisConfig, redis_url: str, node: str, said: NodeReport) -> Iterator[str]:
    if not said.redis_complaint:
        return
    setting = "redis.url" if config.redis.url is not None else "redis.host"
    if said.redis_complaint == WRONG_PASSWORD:
        advice = f"correct the password in {setting}"
    else:
        advice = f"open the way there from that node, or give another address in {setting}"
    yield f"the Redis at {masked(redis_url)} {said.redis_complaint} when node {node} asks: {advice}"


def _of_ports(config: RachisConfig, node: str, said: NodeReport) -> Iterator[str]:
    needed = ports_needed(config.engine)
    if said.free_ports is not None and said.free_ports < needed:
        yield (
            f"only {said.free_ports} ports of {config.pools.ports} are free on node {node}, a worker needs {needed}: "
            "end what listens there, or give pools.ports another range"
        )


def _of_model(config: RachisConfig, node: str, said: NodeReport) -> Iterator[str]:
    if said.model is not None and said.model.missing:
        yield (
            f"the model {config.model.path} is not on node {node}: {said.model.missing}; copy it there, "
            "or correct model.path"
        )
    weight_bytes = said.model.weight_bytes if said.model is not None else 0
    kv_bytes = config.engine.kv_cache_gib * _GIB if config.engine.kv_blocks is None else 0.0
    if config.engine.device == "cpu" and said.available_bytes < weight_bytes + kv_bytes:
        yield (
            f"node {node} has {said.available_bytes / _GIB:.1f} GiB of memory left, and a worker needs "
            f"{(weight_bytes + kv_bytes) / _GIB:.1f} GiB for weights and KV blocks: end what else runs there, "
            "or lower engine.kv_cache_gib"
        )


def _of_models(config: RachisConfig, reports: Mapping[str, NodeReport]) -> Iterator[str]:
    nodes: dict[str, list[str]] = {}
    for node, said in reports.items():
        if said.model is not None and said.model.digest:
            nodes.setdefault(said.model.digest, []).append(node)
    if len(nodes) > 1:
        groups = "; ".join(f"{', '.join(names)} (digest {digest})" for digest, names in nodes.items())
        yield f"the files in {config.model.path} are not the same on all nodes: {groups}; copy one model to all of them"
