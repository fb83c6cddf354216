"""Checks of whether hand-offs, prefix caching, host memory and adapters are really used, and tokens right. Pure.

Counts are since the workers started. Beside them stand probes: requests of the doctor's own, of one prompt that nobody
has sent before, and a few answers that one worker alone gives too.
"""

from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire

from command_line.doctor.findings import Fault, Unknown, Verdicts
from command_line.doctor.seen import Comparison, Probe, Seen, name_of
from control_plane.overview import complaints

# As in the alerts RachisHandoffFailures and RachisLeaseExpiries.
MOST_RECOMPUTED_SHARE = 0.05
# Fewer say nothing of a share.
LEAST_HANDOFFS = 5
LEAST_DECISIONS = 50
# Where lower precision flips what is likeliest: log-probability between the two likeliest tokens.
NEAR_TIE = 0.5


def probes_answered(seen: Seen) -> Verdicts:
    """A probe is best effort: without an answer it may only have waited behind others."""
    for probe in _all_probes(seen):
        if not probe.error:
            continue
        what = f"a request of {probe.prompt_tokens} tokens has got no answer ({probe.error})"
        if not seen.usable(wire.POOL_DECODE):
            yield Unknown("no decode worker may get requests")
        elif probe.is_late and seen.router.in_flight_requests:
            yield Unknown(f"{what}: it is best effort, and others had to be served")
        else:
            yield Fault("router", what)


def handoffs_recomputed(seen: Seen) -> Verdicts:
    for name, counters in _decode_counters(seen):
        failed, tried = counters.handoffs_recomputed, _tried(counters)
        if failed >= LEAST_HANDOFFS and failed > MOST_RECOMPUTED_SHARE * tried:
            yield Fault(name, f"{name} could not pull {failed} of {tried} hand-offs and computed these prompts itself")


def handoffs_expired(seen: Seen) -> Verdicts:
    for name, counters in _decode_counters(seen):
        late, tried = counters.handoffs_expired, _tried(counters)
        if late >= LEAST_HANDOFFS and late > MOST_RECOMPUTED_SHARE * tried:
            yield Fault(name, f"{late} of {tried} hand-offs came to {name} after their deadline, and were recomputed")


def handoffs_mismatched(seen: Seen) -> Verdicts:
    for name, counters in _decode_counters(seen):
        if counters.handoffs_mismatched:
            yield Fault(name, f"{name} got KV blocks of other tokens or content, {counters.handoffs_mismatched} times")


def handoffs_unused(seen: Seen) -> Verdicts:
    """By the reasons that the router has counted. Where the prefill pool is empty, that is the finding."""
    reasons = seen.index.disaggregation
    total, local = sum(reasons.values()), {name: reasons.get(name, 0) for name in ("short_remainder", "prefill_slow")}
    if total >= LEAST_DECISIONS and sum(local.values()) == total and seen.usable(wire.POOL_PREFILL):
        told = ", ".join(f"{name} {count}" for name, count in local.items() if count)
        yield Fault(
            "placement.disaggregation",
            f"of {total} requests none was handed off ({told}): decode workers compute all prompts, and the prefill "
            "pool is idle",
        )


def handoff_pulled(seen: Seen) -> Verdicts:
    """By what came of the probes that were to be handed off."""
    if not seen.usable(wire.POOL_PREFILL):
        yield Unknown("no prefill worker may get requests")
        return
    answered = [probe for probe in _all_probes(seen) if not probe.error]
    handed = [probe for probe in answered if not probe.is_local]
    if not handed:
        why = "the probes have got no answer"
        if answered:
            tokens, reason = answered[0].prompt_tokens, answered[0].reason or "not remembered"
            why = f"the router had decode workers compute a prompt of {tokens} tokens ({reason})"
        yield Unknown(why)
        return
    route, tokens = handed[0].route, handed[0].prompt_tokens
    if route.handoff == generation.HANDOFF_OUTCOME_RECOMPUTED:
        yield Fault(
            route.decode_worker_id,
            f"{route.decode_worker_id} could not pull the blocks that {route.prefill_worker_id} had computed of "
            f"{tokens} tokens, and computed them again",
        )
    elif not route.prefill_worker_id or route.handoff == generation.HANDOFF_OUTCOME_NONE:
        yield Fault(
            "placement.disaggregation",
            f"a prompt of {tokens} tokens that was to be handed off ({handed[0].reason}) was computed and decoded by "
            f"{route.decode_worker_id} alone",
        )


def handoff_deadline(seen: Seen) -> Verdicts:
    """By what pulls are measured to take. A hand-off may be as long as the model's context."""
    limit_s = seen.config.handoff.deadline_s
    for view in seen.of_pool(wire.POOL_DECODE):
        costs, tokens = view.registration.costs, view.registration.model.max_model_len
        takes_s = costs.pull_s + costs.pull_s_per_token * tokens
        if costs.pull_s_per_token and takes_s > limit_s:
            name, longest = name_of(view), max(0, int((limit_s - costs.pull_s) / costs.pull_s_per_token))
            yield Fault(
                "handoff.deadline_s",
                f"{name} is measured to pull {longest} tokens within handoff.deadline_s of {limit_s:g} s: longer "
                f"prompts, up to {tokens}, are always computed again",
            )


def prefix_cache(seen: Seen) -> Verdicts:
    """A prompt that comes again to a worker that has computed or decoded it finds it there."""
    if any("prefix cache" in view.registration.model.missing_features for view in seen.workers):
        yield Unknown("the model has none here")
        return
    held: set[str] = set()
    for probe in seen.probes:
        if probe.error:
            continue
        worker, route = probe.computed_by, probe.route
        if worker in held:
            if _was_overrun(seen, worker):
                yield Unknown(f"{worker} has computed as much since as its cache holds")
            elif not probe.completion.usage.cached_tokens:
                yield Fault(
                    worker, f"{worker} has computed {probe.prompt_tokens} tokens again that it had computed just before"
                )
            return
        held |= {route.prefill_worker_id, route.decode_worker_id} - {""}
    yield Unknown("no worker has got the same prompt twice" if held else "the probes have got no answer")


def _was_overrun(seen: Seen, worker: str) -> bool:
    """Between the two looks so many other tokens came that nothing of the probe has to be there any more."""
    for view in seen.workers:
        again = seen.again(view)
        if name_of(view) == worker and again is not None:
            came = again.counters.prompt_tokens - view.counters.prompt_tokens
            return came >= view.load.total_blocks * view.registration.block_size_tokens > 0
    return False


def token_identity(seen: Seen) -> Verdicts:
    for each in seen.comparisons:
        divergence = each.divergence
        if divergence is None or _is_near_tie(each):
            continue
        yield Fault(
            each.worker_id,
            f"the answer to {each.prompt_tokens} tokens is not that of {each.worker_id} alone: other "
            f"{divergence.what} from its token {divergence.position} on",
        )


def host_tier(seen: Seen) -> Verdicts:
    tiers = seen.config.tiers
    is_wanted = tiers.host_gib > 0 if tiers.host_ratio is None else tiers.host_ratio > 0
    setting = "tiers.host_gib" if tiers.host_ratio is None else "tiers.host_ratio"
    for view in seen.workers:
        if not view.HasField("load"):
            continue
        name, blocks = name_of(view), max(view.load.total_host_blocks, view.tiers.host_capacity_blocks)
        if is_wanted and not blocks and "tiers" not in view.registration.model.missing_features:
            yield Fault(name, f"{setting} gives {name} host memory, and it has room for no block there")
        elif view.tiers.failed_copy_blocks:
            yield Fault(
                name, f"copies of {view.tiers.failed_copy_blocks} blocks to or from host memory of {name} failed"
            )


def features(seen: Seen) -> Verdicts:
    for sentence in complaints.missing_features(seen.workers):
        yield Fault("the model", f"the model has {sentence}")


def adapters(seen: Seen) -> Verdicts:
    served = {view.adapter.name for view in seen.adapters}
    for name in seen.config.lora.folders:
        if name not in served:
            yield Fault(name, f"adapter {name} is configured (lora.adapters), and requests for it are refused")


def _all_probes(seen: Seen) -> list[Probe]:
    return [*seen.probes, *([seen.session] if seen.session is not None else ())]


def _decode_counters(seen: Seen) -> list[tuple[str, wire.WorkerCounters]]:
    return [(name_of(view), view.counters) for view in seen.of_pool(wire.POOL_DECODE) if view.HasField("counters")]


def _tried(counters: wire.WorkerCounters) -> int:
    return counters.handoffs_pulled + counters.handoffs_recomputed + counters.handoffs_expired


def _is_near_tie(each: Comparison) -> bool:
    """In lower precision two tokens that are almost alike likely may change places."""
    assert each.divergence is not None
    return not each.exact and each.divergence.gap is not None and each.divergence.gap < NEAR_TIE
