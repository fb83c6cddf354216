"""Checks of the router and of what it follows: Redis, its queue, how requests end, the prefix index. Pure.

Counts are since the router started: what they tell may be over.
"""

from functools import partial

from cluster_core.objectives import RequestClass
from command_line.doctor.findings import Fault, Unknown, Verdicts
from command_line.doctor.seen import Seen, is_usable
from control_plane.model.lifecycle import State
from control_plane.overview.complaints import complaints_of, first_names

# As in the alerts on these figures.
MOST_FAILED_SHARE = 0.02
MOST_WAITING_PER_WORKER = 4
MOST_LAG_BATCHES = 100
MOST_INDEX_SHARE = 0.7
TTFT_SHARE = 0.9
# Of what clients' prompts take, from where on new ones are about to be refused.
MOST_PROMPT_MEMORY_SHARE = 0.9
# Of Redis's, which gateways fill to nine tenths.
MOST_REDIS_SHARE = 0.95
PROMPT_MEMORY = "router.max_prompt_mib"
# Fewer say nothing of a share.
LEAST_FAILED = 5
LEAST_REQUESTS = 100
_MIB = 1 << 20
_CLASS_WORDS = {RequestClass.INTERACTIVE: "requests", RequestClass.BEST_EFFORT: "best-effort requests"}


def registry(seen: Seen) -> Verdicts:
    if not seen.router.registry_connected:
        yield Fault(
            "redis", "Redis does not answer the router: it works with the workers it knew last, and none can join"
        )


def redis_memory(seen: Seen) -> Verdicts:
    """Stored responses go before it is as full as that."""
    use = seen.router.redis_memory
    if use.limit_bytes and use.used_bytes > MOST_REDIS_SHARE * use.limit_bytes:
        share, taken = use.used_bytes / use.limit_bytes, f"{use.used_bytes // _MIB} of {use.limit_bytes // _MIB} MiB"
        sentence = f"Redis is {share:.0%} full, {taken} ({use.limit}): once it is full, it takes hardly anything new"
        yield Fault("redis", sentence)


def overload(seen: Seen) -> Verdicts:
    limit = seen.config.router.max_queued_requests
    if limit and seen.router.queued_requests >= limit:
        yield Fault("router", f"the router's queue is full with {limit} requests: more are refused")
    for use in seen.router.memory:
        if use.limit == PROMPT_MEMORY and use.used_bytes >= MOST_PROMPT_MEMORY_SHARE * use.limit_bytes:
            taken = f"{use.used_bytes // _MIB} of {use.limit_bytes // _MIB} MiB"
            yield Fault(use.limit, f"prompts take {taken} ({use.limit}): more are about to be refused")


def queue(seen: Seen) -> Verdicts:
    """Where there is nobody to wait for, that is the finding."""
    workers = sum(map(is_usable, seen.workers))
    if workers and seen.waiting_requests > MOST_WAITING_PER_WORKER * workers:
        yield Fault("router", f"{seen.waiting_requests} requests wait for {workers} workers: more come than are served")


def poison(seen: Seen) -> Verdicts:
    requests = seen.router.poisoned_requests
    if requests:
        yield Fault("router", f"{requests} requests, by what they ask for, are refused because engines died of them")


def failures(seen: Seen) -> Verdicts:
    outcomes = seen.router.outcomes
    lost = sum(outcomes.get(state.value, 0) for state in (State.FAILED, State.EXPIRED))
    ended = sum(outcomes.values())
    if lost >= LEAST_FAILED and lost > MOST_FAILED_SHARE * ended:
        yield Fault("router", f"{lost} of {ended} requests have failed or expired since the router started")


def ttft(seen: Seen) -> Verdicts:
    """The objective is a bound of the histogram."""
    name = "rachis_request_ttft_seconds"
    for whose, objectives in seen.config.objectives.by_class.items():
        label, objective_s = ("class", str(whose)), objectives.ttft_s
        requests = seen.metrics.get((f"{name}_count", frozenset({label})), 0.0)
        kept = seen.metrics.get((f"{name}_bucket", frozenset({label, ("le", str(objective_s))})), requests)
        if requests >= LEAST_REQUESTS and kept < TTFT_SHARE * requests:
            share = f"{1 - kept / requests:.0%} of {requests:.0f} {_CLASS_WORDS[whose]}"
            yield Fault("objectives.ttft_s", f"{share} have waited longer than {objective_s:g} s for their first token")


def traces(seen: Seen) -> Verdicts:
    name = "rachis_traces_dropped_total"
    dropped = sum(value for (metric, _), value in seen.metrics.items() if metric == name)
    if dropped:
        yield Fault(
            "tracing.otlp_endpoint",
            f"{dropped:.0f} traces were dropped: {seen.config.tracing.otlp_endpoint} did not take them in time",
        )


def _index_complains(kind: str, subject: str, seen: Seen) -> Verdicts:
    """What `rachis status` says of the index."""
    for complaint in complaints_of(seen.index):
        if complaint.kind == kind:
            yield Fault(subject, complaint.sentence)


index_stale = partial(_index_complains, "stale", "index")
index_silent = partial(_index_complains, "silent", "index")
index_sync = partial(_index_complains, "behind", "index")


def index_away(seen: Seen) -> Verdicts:
    """Where the registry does not answer either, that is the finding."""
    if seen.router.registry_connected:
        yield from _index_complains("away", "redis", seen)


def index_lag(seen: Seen) -> Verdicts:
    for worker in seen.index.workers:
        if worker.lag_batches > MOST_LAG_BATCHES:
            yield Fault(worker.worker_id, f"the index is {worker.lag_batches} batches behind {worker.worker_id}")


def index_damaged(seen: Seen) -> Verdicts:
    if seen.index.damaged:
        yield Fault("index", f"{seen.index.damaged} batches or snapshots of workers could not be read")


def index_size(seen: Seen) -> Verdicts:
    entries, capacity = seen.index.entries, seen.index.capacity_entries
    if seen.index.dropped and entries > MOST_INDEX_SHARE * capacity:
        yield Fault(
            "index.max_entries",
            f"the index has forgotten {seen.index.dropped} chunks for hotter ones, with room for {capacity}",
        )


def index_claims(seen: Seen) -> Verdicts:
    unanswered = [check for check in seen.claims if check.error]
    if unanswered:
        names = first_names([check.worker_id for check in unanswered])
        yield Unknown(f"{names} could not be compared with the index: {unanswered[0].error}")
    for check in seen.claims:
        untrue = check.device.untrue + check.host.untrue
        if untrue:
            sentence = f"the index claims {untrue} chunks of {check.worker_id} that its engine does not hold"
            yield Fault(check.worker_id, sentence)


def index_unused(seen: Seen) -> Verdicts:
    """Prompts of which none fills a chunk are placed by load, however much they share."""
    requests = sum(view.counters.requests for view in seen.workers)
    cacheable = sum(view.registration.cacheable_requests for view in seen.workers)
    if requests >= LEAST_REQUESTS and not cacheable:
        block = max((view.registration.block_size_tokens for view in seen.workers), default=0)
        yield Fault(
            "engine.block_size_tokens",
            f"of {requests} requests none has filled a block of {block} tokens: nothing of them is cached or found",
        )
    elif cacheable >= LEAST_REQUESTS and not seen.index.entries and not any(each.silent for each in seen.index.workers):
        chunk = seen.index.chunk_tokens
        yield Fault(
            "index.chunk_tokens",
            f"of {requests} requests none has filled a chunk of {chunk} tokens: they are placed by load alone",
        )
