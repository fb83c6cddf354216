"""What an imitated GPU is told, as the worker gives it to vLLM: its cost model, and where it listens."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster_core.ports import PortRange
from cluster_sim.costs import catalog
from cluster_sim.costs.step_work import CostModel
from worker_runtime.engine_settings import IMITATION_KEY

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True, slots=True)
class ImitationSettings:
    """host, ports: where its agent of NIXL's kind listens."""

    costs: CostModel
    host: str
    ports: PortRange | None

    @classmethod
    def of(cls, config: "VllmConfig") -> "ImitationSettings":
        """Raises InvalidInputError where there is no such cost model."""
        given = config.additional_config[IMITATION_KEY]
        ports = PortRange.parse(given["ports"]) if given["ports"] is not None else None
        return cls(catalog.load(given["cost_model"]), given["host"], ports)
