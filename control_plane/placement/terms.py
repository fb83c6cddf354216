"""The terms that placement weighs, and the policies made of them: literal tables, for each pool.

`hotness` is this project's. The others are what it is compared with:
    random, round_robin, least_loaded     know nothing of prefixes
    prefix_only                           the longest cached prefix, whatever the load
    cost_formula                          as published by Dynamo: prefill tokens active and new ones less what is cached
                                          (1.0 of it on the device, 0.75 in host memory), plus blocks that decode
    lmetric                               as published (arXiv:2603.15202): prefill tokens, new and waiting, times batch

Workers that do both are weighed by a table of their own where they prefill, and so are decode workers of a service
without prefill workers. Which of them decodes what another one has prefilled is weighed as among decode workers.
"""

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from rachis.v1 import worker_pb2 as wire

from cluster_core.errors import InvalidInputError
from control_plane.fleet.loads import Floats
from control_plane.model.worker_snapshot import Pool
from control_plane.placement.policy import PlacementPolicy, Question, Term
from control_plane.placement.view import PoolView

# A request weighs as so many tokens, in `load`.
_REQUEST_TOKENS = 16
# The published formula counts decodes in blocks of so many tokens.
_FORMULA_BLOCK_TOKENS = 16
_FORMULA_HOST_CREDIT = 0.75
# What a request costs besides its tokens: differences below it decide nothing.
_OVERHEAD_S = 1e-3
# A second of a request's own work costs so many more seconds of others.
_WORK_PRICE = 2.0
# What a long prompt pays in the other half at most, in times of what makes it long.
_MOST_LONG_PRICE = 1.5


def prefill_s(question: Question, view: PoolView) -> Floats:
    """Seconds of engine time of the request's own prefill: loading what host memory holds, computing the rest."""
    fixed = view.candidates.fixed
    prompt = max(question.prompt_tokens, 1)
    uncached = view.uncached(question.prompt_tokens)
    kept = prompt - uncached
    seconds: Floats = (
        adapter_s(question, view)
        + fixed.prefill_s
        + uncached * fixed.prefill_s_per_token
        + (prompt * prompt - kept * kept) / 2 * fixed.prefill_s_per_pair
        + view.host * fixed.load_s_per_token
    )
    return seconds


def adapter_s(question: Question, view: PoolView) -> Floats:
    """Seconds until the request's adapter is loaded: 0 where it is, and without one."""
    fixed = view.candidates.fixed
    if not question.adapter:
        return np.zeros(len(view.candidates))
    return np.where(_has_loaded(question, view), 0.0, fixed.adapter_load_s)


def adapter(question: Question, view: PoolView) -> Floats:
    """1 where the request's adapter is loaded, and without one."""
    return np.ones(len(view.candidates)) if not question.adapter else _has_loaded(question, view).astype(np.float64)


def _has_loaded(question: Question, view: PoolView) -> NDArray[np.bool_]:
    return np.array([question.adapter in each for each in view.candidates.fixed.adapters], dtype=np.bool_)


def expected_ttft_s(question: Question, view: PoolView) -> Floats:
    """Seconds to the first token: the queue, and the request's own prefill."""
    expected: Floats = view.candidates.queue_s + prefill_s(question, view) + _OVERHEAD_S
    return expected


def sessions_s(question: Question, view: PoolView) -> Floats:
    """Seconds that sessions which are open there are expected to take, to another session. To a whole prompt none:
    engines compute it before them."""
    open_there = view.candidates.arriving
    if not question.arriving:
        return np.zeros(len(open_there))
    return open_there * view.session.prefill_s(view.candidates.fixed)


def ttft(question: Question, view: PoolView) -> Floats:
    """The lowest price over each one's: seconds to the first token, where own work counts more than waiting; of a
    session those until it will be whole, too.

    What a hit saves is saved for all that come after: without that price, requests are spread over workers that
    have to compute again what others hold. And a long prompt pays for the half of the pool that short ones are quick
    in. `rachis bench placement` found both flat in their constants.
    """
    own_s = prefill_s(question, view)
    price = view.candidates.queue_s + sessions_s(question, view) + (1.0 + _WORK_PRICE) * own_s + _OVERHEAD_S
    shortest_s = float(own_s.min(initial=math.inf))
    if shortest_s > view.long_s:
        rows = len(view.candidates)
        price[rows - rows // 2 :] += min(shortest_s, _MOST_LONG_PRICE * view.long_s)
    return _lowest_over(price)


def cached(question: Question, view: PoolView) -> Floats:
    """Share of the prompt that lies in either tier."""
    return np.minimum((view.device + view.host) / max(question.prompt_tokens, 1), 1.0)


def pull(question: Question, view: PoolView) -> Floats:
    """Share of the prompt's KV that does not have to be pulled."""
    return np.minimum(view.device / max(question.prompt_tokens, 1), 1.0)


def affinity(question: Question, view: PoolView) -> Floats:
    """Share of the prompt that is shared with what runs and waits there, more with more of them."""
    shared = np.minimum(view.shared / max(question.prompt_tokens, 1), 1.0)
    closeness: Floats = shared * (1.0 - np.exp2(-view.sharers))
    return closeness


def load(_question: Question, view: PoolView) -> Floats:
    """The fewest tokens in flight over each one's; requests count as some tokens each."""
    return _lowest_over(1.0 + view.candidates.in_flight_tokens + _REQUEST_TOKENS * view.candidates.in_flight_requests)


def room(_question: Question, view: PoolView) -> Floats:
    """Share of the places in the batch that are free."""
    places = np.maximum(view.candidates.fixed.max_running_requests, 1.0)
    free: Floats = np.clip(1.0 - view.candidates.in_flight_requests / places, 0.0, 1.0)
    return free


def memory(question: Question, view: PoolView) -> Floats:
    """Share of the KV memory that is left with this request; 0 where it does not fit. 1 where nothing is known."""
    total = view.candidates.fixed.total_tokens
    free = np.minimum(view.candidates.fixed.free_tokens, total - view.occupied_tokens())
    left = free - question.prompt_tokens - question.max_tokens + view.device
    return np.where(total > 0, np.clip(left / np.maximum(total, 1.0), 0.0, 1.0), 1.0)


def turn(_question: Question, view: PoolView) -> Floats:
    """1 for the one that was placed on longest ago."""
    return _lowest_over(1.0 + view.candidates.turn - view.candidates.turn.min(initial=np.inf))


def published_prefill(question: Question, view: PoolView) -> Floats:
    """The lowest cost of the published formula over each one's; nothing decodes on a prefill worker."""
    credit = view.device + _FORMULA_HOST_CREDIT * view.host
    return _lowest_over(1.0 + np.maximum(view.candidates.uncomputed_tokens + question.prompt_tokens - credit, 0.0))


def published_decode(_question: Question, view: PoolView) -> Floats:
    """The same for a decode worker: the published formula gives no credit for overlap there."""
    return _lowest_over(1.0 + np.ceil(view.candidates.in_flight_tokens / _FORMULA_BLOCK_TOKENS))


def published_both(question: Question, view: PoolView) -> Floats:
    """The same for a worker that does both: the whole formula, in blocks."""
    credit = view.device + _FORMULA_HOST_CREDIT * view.host
    prefill = np.maximum(view.candidates.uncomputed_tokens + question.prompt_tokens - credit, 0.0)
    return _lowest_over(1.0 + np.ceil((prefill + view.candidates.in_flight_tokens) / _FORMULA_BLOCK_TOKENS))


def published_product(question: Question, view: PoolView) -> Floats:
    """The lowest product over each one's: prompt tokens to compute, this request's among them, times the requests that
    would be there with it."""
    tokens = view.candidates.uncomputed_tokens + view.uncached(question.prompt_tokens)
    return _lowest_over(tokens * (1.0 + view.candidates.in_flight_requests))


def published_batch(_question: Question, view: PoolView) -> Floats:
    """The same for a decode worker, which computes no prompt."""
    return _lowest_over(1.0 + view.candidates.in_flight_requests)


def _lowest_over(cost: Floats) -> Floats:
    """Costs above 0: the lowest over each one's."""
    score: Floats = cost.min(initial=np.inf) / cost
    return score


Terms = tuple[tuple[str, Term, float], ...]

_PREFILL: Terms = (("ttft", ttft, 1.0),)
_DECODE: Terms = (
    ("affinity", affinity, 2.0),
    ("pull", pull, 0.5),
    ("room", room, 2.0),
    ("memory", memory, 1.0),
    ("adapter", adapter, 1.0),
)

# Without the first of them prompts would be sent where they wait: a decode worker has no queue of prompts.
_BOTH: Terms = (("ttft", ttft, 4.0), *_DECODE)
_PRODUCT: Terms = (("product", published_product, 1.0),)

# Of prefill workers, of decode workers, of workers that do both.
_POLICIES: Mapping[str, tuple[Terms, Terms, Terms]] = {
    "hotness": (_PREFILL, _DECODE, _BOTH),
    "random": ((), (), ()),
    "round_robin": ((("turn", turn, 1.0),),) * 3,
    "least_loaded": ((("load", load, 1.0),),) * 3,
    "prefix_only": ((("cached", cached, 1.0),),) * 3,
    "cost_formula": (
        (("cost", published_prefill, 1.0),),
        (("cost", published_decode, 1.0),),
        (("cost", published_both, 1.0),),
    ),
    "lmetric": (_PRODUCT, (("batch", published_batch, 1.0),), _PRODUCT),
}
POLICIES = tuple(_POLICIES)


def make_policy(
    name: str, pool: Pool, weights: Mapping[str, float] | None = None, *, does_both: bool = False
) -> PlacementPolicy:
    """A policy of `POLICIES` for a pool. weights: by term, instead of the table's; 0 leaves a term out. does_both: for
    decode workers that compute prompts as well, because there are no others.

    Raises InvalidInputError for a term that the policy does not have.
    """
    prefill, decode, both = _POLICIES[name]
    terms = prefill if pool == wire.POOL_PREFILL else both if does_both else decode
    given = weights or {}
    known = [term for term, _, _ in terms]
    for term in given:
        if term not in known:
            raise InvalidInputError(
                f"policy `{name}` has no term `{term}`; it has: {', '.join(known) or 'none'}", field="placement"
            )
    weighed = [(term, function, given.get(term, weight)) for term, function, weight in terms]
    return PlacementPolicy(tuple(each for each in weighed if each[2] > 0), name=name)
