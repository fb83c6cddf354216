"""What one node says of itself before a worker starts there. Runs on the node; what it finds is judged elsewhere."""

import asyncio
import hashlib
from dataclasses import dataclass
from pathlib import Path

from cluster_configs.preemption_costs import CostModel, default_model
from cluster_core import versions
from cluster_core.errors import ConfigError, InvalidInputError
from cluster_core.ports import PortRange, free_ports
from cluster_core.versions import Versions
from cluster_wire.redis_client import REDIS_DOWN, complaint, connect
from cluster_wire.secret import read_secret
from worker_runtime import addresses
from worker_runtime.memory_use import node_memory

_REDIS_TIMEOUT_S = 5.0
_ANY_ADDRESS = "0.0.0.0"
_WEIGHTS = frozenset({".safetensors", ".bin", ".pt"})
# Beside the weights: configuration and tokenizer.
_MODEL_FILES = _WEIGHTS | {".json", ".model", ".jinja"}


@dataclass(frozen=True, slots=True)
class NodeQuestion:
    """What a node is to look at."""

    redis_url: str
    # As configured.
    model_path: str
    # Of these, `ports_needed` have to be free; None: any.
    ports: PortRange | None
    ports_needed: int
    # Of the service's secret: where it is on every host, and what it is at that of `rachis serve`. None: there is none.
    secret_path: str | None = None
    secret_fingerprint: str = ""
    # As configured, of those who prefill. None: there is none.
    cost_profile: str | None = None


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What a folder that should hold a model holds."""

    # Why it holds none, in words; empty where it does.
    missing: str = ""
    # Equal for equal models.
    digest: str = ""
    weight_bytes: int = 0


@dataclass(frozen=True, slots=True)
class NodeReport:
    """What a node found. None where the question did not ask."""

    versions: Versions
    # By interface.
    addresses: dict[str, list[str]]
    available_bytes: int
    # What Redis does instead of answering; empty where it answers.
    redis_complaint: str
    model: ModelFiles | None
    free_ports: int | None
    # What is wrong with the service's secret there; empty where nothing is.
    secret_complaint: str = ""


def report(question: NodeQuestion) -> NodeReport:
    """Answers within seconds, whatever is missing."""
    return NodeReport(
        versions=versions.installed(),
        addresses=addresses.interfaces(),
        available_bytes=node_memory()[1],
        redis_complaint=asyncio.run(_redis_complaint(question.redis_url)),
        model=model_files(question.model_path),
        # Of all addresses: which one a worker will have is decided when it starts.
        free_ports=free_ports(_ANY_ADDRESS, question.ports, question.ports_needed) if question.ports else None,
        secret_complaint=secret_complaint(question.secret_path, question.secret_fingerprint),
    )


@dataclass(frozen=True, slots=True)
class CostProfileReport:
    """What a node found of the file that its prefill workers will read."""

    # What is wrong with it; empty where nothing is.
    complaint: str = ""


def cost_profile_report(question: NodeQuestion) -> CostProfileReport:
    if question.cost_profile is None:
        return CostProfileReport()
    try:
        CostModel.load(Path(question.cost_profile), default_model("cpu"))
    except InvalidInputError as error:
        return CostProfileReport(str(error))
    return CostProfileReport()


def secret_complaint(path: str | None, fingerprint: str) -> str:
    """fingerprint: at the host of `rachis serve`."""
    try:
        if path is not None and read_secret(Path(path)).fingerprint != fingerprint:
            return f"security.secret_file: {path} is another one than that of `rachis serve`; copy that to it"
    except ConfigError as error:
        return str(error)
    return ""


def model_files(path: str) -> ModelFiles | None:
    """None for what is no folder: the model that comes with Rachis, or an id that vLLM downloads by itself."""
    if not path.startswith(("/", "./", "../", "~")):
        return None
    folder = Path(path).expanduser()
    try:
        if not folder.is_dir():
            return ModelFiles(missing="there is no such folder")
        config = folder / "config.json"
        if not config.is_file():
            return ModelFiles(missing="there is no config.json in it")
        files = sorted(path for path in folder.iterdir() if path.suffix in _MODEL_FILES and path.is_file())
        sizes = {path: path.stat().st_size for path in files}
        digest = hashlib.sha256(config.read_bytes())
    except OSError as error:
        return ModelFiles(missing=f"it cannot be read ({error.strerror or error})")
    digest.update(repr([(path.name, size) for path, size in sizes.items()]).encode())
    weight_bytes = sum(size for path, size in sizes.items() if path.suffix in _WEIGHTS)
    return ModelFiles(digest=digest.hexdigest()[:12], weight_bytes=weight_bytes)


async def _redis_complaint(url: str) -> str:
    client = connect(url, _REDIS_TIMEOUT_S)
    try:
        async with asyncio.timeout(2 * _REDIS_TIMEOUT_S):
            await client.ping()
    except TimeoutError:
        return "does not answer in time"
    except REDIS_DOWN as error:
        return complaint(error)
    finally:
        await client.aclose()
    return ""
