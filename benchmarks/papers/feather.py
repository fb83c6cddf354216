"""FEATHER (ETRI shared-prefix batching with a chunked hash tree and learned stop policies), section 5, simulated.

vLLM's own scheduler and the decode scheduler with its stop policies, real ones, over a cost model of the paper's GPU and
models. The plots' values are not printed, so what the text states is compared, mostly ratios. A batch that shares is
counted twice, under two models of what sharing saves, since the paper does not tell them apart:

    cache     prefixes that are read again in a step come from the L2 cache as far as it reaches (`cluster_sim.roofline`)
    cascade   the same, and vLLM's former cascade attention: while all running requests share a prefix, and its own
              rule says so, the prefix is read once for all of them, and its attention is a matrix product

Open loop: Poisson arrivals for `_SECONDS`, of which the first `_WARM_S` do not count. No constant is fitted: GPU and
model are `cost_models/`, the cascade rule is vLLM's (`use_cascade_attention` of its FlashAttention backend, 2025).
What the paper leaves open and is assumed here: `own_tokens` (those of its experiment 1), how long it measures.
"""

import gc
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.papers.table import Cell, Progress, as_json, markdown
from cluster_sim import cost_files, costs, roofline
from cluster_sim.costs import CostModel, StepWork
from cluster_sim.engine import OutcomeKind, SimJob

if TYPE_CHECKING:
    from cluster_sim.vllm_engine import VllmSimEngine

RESULTS = Path(__file__).parents[1] / "results"
LLAMA, LONGCHAT = "Llama 3 8B", "LongChat 13B"
CACHE, CASCADE = "cache", "cascade"
FCFS, PRODUCTION = "fcfs", "heuristic, 2 s"

_BLOCK_TOKENS = 16
_MOST_RUNNING, _MOST_BATCHED_TOKENS = 500, 32_768
_SECONDS, _WARM_S = 60.0, 20.0
# The paper bounds nobody's wait; production does.
_NO_BOUND_S = 1e6
