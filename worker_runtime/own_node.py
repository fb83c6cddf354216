"""What a worker finds out about the node that it is about to start on: whether it fits, and how others reach it.

`control_plane.service.preflight` asks the same of the nodes that are there when the service starts; this is for those
that join later, too.
"""

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cluster_core.errors import StartError
from cluster_core.versions import Versions, differences
from cluster_wire.secret import Secret, read_secret
from worker_runtime import addresses
from worker_runtime.engine_settings import EngineSettings
from worker_runtime.node_report import model_files, secret_complaint

NODE = socket.gethostname()


@dataclass(frozen=True, slots=True)
class NodePlace:
    """Where the cluster finds the node."""

    address: str
    # Of the whole cluster.
    nodes: int


def check(here: Versions, service: Versions, model_path: str) -> None:
    """Raises StartError where the versions do not fit those of the service, or the model is not there."""
    found = differences(here, f"node {NODE}", service, "the node of `rachis serve`")
    if found:
        raise StartError(f"{', '.join(found)}; install the same on both and restart the node's Ray")
    model = model_files(model_path)
    if model is not None and model.missing:
        raise StartError(
            f"the model {model_path} is not on node {NODE}: {model.missing}; copy it there, or correct model.path"
        )


def secret(path: str | None, fingerprint: str) -> Secret | None:
    """The service's, from this node's own file. fingerprint: at the host of `rachis serve`. Raises StartError."""
    found = secret_complaint(path, fingerprint)
    if found:
        raise StartError(f"node {NODE}: {found}")
    return read_secret(Path(path)) if path is not None else None


def listening_address(engine: EngineSettings, place: Callable[[], NodePlace]) -> str:
    """Where the worker listens and is reached. Raises StartError where the node has no such address."""
    if engine.host:
        return engine.host
    found = place()
    return addresses.own_address(engine.network, found.address, found.nodes, addresses.interfaces(), NODE)


def set_environment(variables: Mapping[str, str]) -> None:
    """What the node's operator has set for UCX, or for FlashInfer, stays."""
    for name, value in variables.items():
        is_operators = name.startswith("UCX_") or "FLASHINFER" in name
        if not (is_operators and name in os.environ):
            os.environ[name] = value
