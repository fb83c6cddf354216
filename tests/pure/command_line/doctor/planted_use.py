"""Mechanisms that are on and do nothing, and answers that are not right."""

from dataclasses import replace
from typing import Any

from rachis.v1 import admin_pb2 as admin
from rachis.v1 import generation_pb2 as generation

from benchmarks.identity import Divergence
from command_line.doctor.seen import Comparison, Probe
from tests.pure.command_line.doctor.planted_workers import without_a_pool
from tests.pure.command_line.doctor.world import (
    DECODE,
    PREFILL,
    Plant,
    Planted,
    again,
    both,
    configured,
    index,
    probe,
    router,
    worker,
)

NONE, PULLED = generation.HANDOFF_OUTCOME_NONE, generation.HANDOFF_OUTCOME_PULLED
RECOMPUTED = generation.HANDOFF_OUTCOME_RECOMPUTED
FAILED = Probe(577, error="INTERNAL: a defect")
LATE = Probe(577, error="DEADLINE_EXCEEDED: the deadline has passed", is_late=True)


def probes(*sent: Probe) -> Plant:
    return lambda seen: replace(seen, probes=sent)


def as_session(handoff: generation.HandoffOutcome.ValueType) -> Plant:
    return lambda seen: replace(seen, session=probe(handoff=handoff, reason="session"))


def divergence(gap: float | None, *, exact: bool) -> Plant:
    parted = Divergence(0, 577, {}, 3, 17, 42, gap, "tokens")
    return lambda seen: replace(seen, comparisons=[Comparison(577, "decode-1", exact, parted)])


def counters(**counts: Any) -> Plant:
    return worker("decode-0", **{f"counters__{name}": count for name, count in counts.items()})


PLANTED = (
    Planted("answers", probes(FAILED), "router", "got no answer (INTERNAL: a defect)"),
    Planted("answers", probes(LATE), "router", "got no answer (DEADLINE_EXCEEDED"),
    Planted(
        "handoff",
        probes(probe(handoff=RECOMPUTED), probe(cached=576)),
        "decode-0",
        "could not pull the blocks that prefill-0 had computed of 577 tokens",
    ),
    Planted(
        "handoff",
        probes(probe(handoff=NONE, prefill=""), probe(handoff=NONE, prefill="", cached=576)),
        "placement.disaggregation",
        "was to be handed off (long_remainder) was computed and decoded by decode-0 alone",
    ),
    Planted(
        "handoff",
        both(probes(probe(reason="prefill_slow", prefill="", handoff=NONE)), as_session(RECOMPUTED)),
        "decode-0",
        "could not pull the blocks that prefill-0 had computed of 577 tokens",
    ),
    Planted(
        "handoffs_recomputed", counters(handoffs_recomputed=6, handoffs_pulled=94), "decode-0", "6 of 100 hand-offs"
    ),
    Planted("handoffs_expired", counters(handoffs_expired=61, handoffs_pulled=54), "decode-0", "61 of 115 hand-offs"),
    Planted("handoffs_mismatched", counters(handoffs_mismatched=1), "decode-0", "other tokens or content, 1 times"),
    Planted(
        "handoffs_unused",
        index(disaggregation={"short_remainder": 49, "prefill_slow": 1}),
        "placement.disaggregation",
        "of 50 requests none was handed off (short_remainder 49, prefill_slow 1)",
    ),
    Planted(
        "handoff_deadline",
        worker("decode-0", registration__costs__pull_s_per_token=0.005),
        "handoff.deadline_s",
        "pull 2998 tokens within handoff.deadline_s of 15 s: longer prompts, up to 4096,",
    ),
    Planted("prefix_cache", probes(probe(), probe()), "prefill-0", "577 tokens again that it had computed just before"),
    Planted(
        "prefix_cache",
        probes(probe(), probe(handoff=NONE, prefill="", reason="short_remainder")),
        "decode-0",
        "577 tokens again that it had computed just before",
    ),
    Planted("token_identity", divergence(0.01, exact=True), "decode-1", "other tokens from its token 3 on"),
    Planted("token_identity", divergence(0.5, exact=False), "decode-1", "other tokens from its token 3 on"),
    Planted("token_identity", divergence(None, exact=False), "decode-1", "other tokens from its token 3 on"),
    Planted(
        "host_tier",
        worker("prefill-0", load__total_host_blocks=0, tiers=None),
        "prefill-0",
        "tiers.host_gib gives prefill-0 host memory, and it has room for no block",
    ),
    Planted("host_tier", worker("decode-0", tiers__failed_copy_blocks=8), "decode-0", "copies of 8 blocks"),
    Planted(
        "features",
        worker("decode-0", registration__model__missing_features={"sessions": "its KV is not one list of blocks"}),
        "the model",
        "the model has no sessions: its KV is not one list of blocks",
    ),
    Planted("adapters", configured(lora__max_loaded=1, lora__adapters=["tone=/a"]), "tone", "requests for it are"),
)

WELL = {
    "a second time of a model without a prefix cache": both(
        probes(probe(), probe()),
        worker("prefill-0", registration__model__missing_features={"prefix cache": "vLLM keeps none of it"}),
    ),
    "a hand-off that was not needed": probes(probe(reason="short_remainder", prefill="", handoff=NONE)),
    "a second time that another worker had": probes(probe(), probe(prefill="prefill-1")),
    "a prompt that others have pushed out of the cache since": both(
        probes(probe(), probe()),
        again("prefill-0", counters__prompt_tokens=10_000_000),
    ),
    "a probe that gave way to others": both(probes(LATE), router(in_flight_requests=3)),
    "a near tie in lower precision": divergence(0.49, exact=False),
    "an adapter that is served": both(
        configured(lora__max_loaded=1, lora__adapters=["tone=/a"]),
        lambda seen: replace(seen, adapters=[admin.AdapterView(adapter={"name": "tone"})]),  # type: ignore[arg-type]
    ),
    "no host memory that was asked for": both(
        configured(tiers__host_gib=0.0),
        *(worker(name, load__total_host_blocks=0, tiers=None) for name in ("prefill-0", "decode-0")),
    ),
    "a prefill worker that was lost just then": probes(probe(handoff=NONE, prefill="", reason="prefill_down")),
    "short requests, and few": index(disaggregation={"short_remainder": 49}),
    "no pull measured yet": worker("decode-0", registration__costs__pull_s_per_token=0, registration__costs__pull_s=90),
    "no decode worker, told once": both(without_a_pool(DECODE), probes(FAILED)),
    "no prefill worker, told once": both(
        without_a_pool(PREFILL),
        index(disaggregation={"short_remainder": 50}),
        probes(probe(handoff=NONE, prefill="", reason="prefill_down")),
    ),
}
TELLS = {
    "no decode worker, told once": "decode_pool",
    "no prefill worker, told once": "prefill_pool",
    "a second time of a model without a prefix cache": "features",
}
