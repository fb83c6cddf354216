"""The settings of the streaming scheduler, which travel in vLLM's own configuration, as `additional_config`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cluster_configs.preemption_costs import CostModel, default_model
from worker_runtime.engine_settings import IMITATION_KEY

KEY = "rachis_streaming"


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    policy: str
    preemption: Literal["recompute", "swap", "cost"]
    starvation_s: float
    cost_model: CostModel

    @classmethod
    def of(cls, vllm_config: Any) -> "SchedulerSettings":
        """Raises InvalidInputError for a cost profile that cannot be read."""
        given = vllm_config.additional_config[KEY]
        has_gpu = vllm_config.device_config.device_type == "cuda" or IMITATION_KEY in vllm_config.additional_config
        model = default_model("cuda" if has_gpu else "cpu")
        if given["cost_profile"] is not None:
            model = CostModel.load(Path(given["cost_profile"]), model)
        return cls(given["policy"], given["preemption"], given["starvation_s"], model)
