"""What of a scenario says which requests come: the kinds of workloads and their settings."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field

from cluster_configs.schema import Section
from cluster_core.engine_jobs import SessionMode
from cluster_sim.workloads.few_shot import SHAPES

# These say themselves when their requests arrive.
STREAMS: Mapping[str, SessionMode] = {"crawler": SessionMode.APPEND, "anns": SessionMode.UPDATE}
KINDS = ("trace", "azure", "conversation", "prefix_groups", "prefix_tree", "agents", *STREAMS, *SHAPES)


class WorkloadSection(Section):
    """What is sent."""

    kind: str = Field("conversation", description="See `cluster_sim.workloads`.")
    file: Path | None = Field(None, description="Of `trace` and `azure`; a relative one stands beside the scenario.")
    requests: int = Field(
        1000, ge=0, description="0: all of the trace, once. More than it has: again, with prompts that nobody has seen."
    )
    arrivals: Literal["trace", "poisson", "bursty"] = Field(
        "poisson", description="`trace` keeps the times that the requests have, where they have any."
    )
    requests_per_s: float = Field(0.0, ge=0, description="Of arrivals that are drawn, and of `agents`.")
    speed: float = Field(1.0, gt=0, description="How many times faster a trace is played than it was recorded.")
    burstiness: float = Field(3.0, gt=0, le=100, description="Coefficient of variation of the gaps of `bursty`.")
    tenants: int = Field(1, ge=1, le=100_000, description="Prompts of two tenants share nothing; a few send most.")
    groups: int = Field(5, ge=1, le=100_000, description="Of `prefix_groups`; branches at each level of `prefix_tree`.")
    levels: int = Field(3, ge=1, le=16, description="Of `prefix_tree`.")
    shared_tokens: int = Field(2000, ge=0, description="What a group shares, over all levels.")
    own_tokens: int = Field(200, ge=0, description="Mean of what follows; evenly between half and one and a half.")
    output_tokens: int = Field(200, ge=1, description="Mean, likewise; of groups and trees.")
    streaming: bool = Field(True, description="Of sessions: false sends each when its prompt is whole.")
    token_scale: float = Field(
        1.0,
        gt=0,
        le=1000,
        description="Of prompts and answers of `conversation` and `agents`, and of the contexts of sessions.",
    )
    block_tokens: int = Field(64, ge=1, le=65_536, description="Of the drawn kinds and `azure`; a trace has its own.")
