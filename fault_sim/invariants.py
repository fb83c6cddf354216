"""What has to be so after every run, whatever went wrong in it. Each check yields sentences about what is not so."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rachis.v1 import generation_pb2 as generation

from control_plane.dispatch.journey import MOST_DEATHS
from control_plane.model.lifecycle import OUTCOMES, RequestLifecycle, State
from control_plane.server.router_server import RouterServer
from fault_sim.blocks.pool import expected_tokens
from fault_sim.clients import Answer
from fault_sim.world import SEND_TIMEOUT_S, World

# What a client got -> how the router may have counted the request. A client that leaves may cross its answer.
_COUNTED = {
    "OK": {State.FINISHED},
    "CANCELLED": {State.CANCELLED, State.FINISHED, State.FAILED, State.EXPIRED, State.REFUSED},
    "DEADLINE_EXCEEDED": {State.EXPIRED, State.FINISHED, State.FAILED, State.CANCELLED},
    "UNAVAILABLE": {State.FAILED},
    "RESOURCE_EXHAUSTED": {State.REFUSED},
    # Two engines died under it.
    "INTERNAL": {State.FAILED},
}

_RECOMPUTED = generation.HandoffOutcome.Name(generation.HANDOFF_OUTCOME_RECOMPUTED)

# Until the router knows of what has happened at a worker.
_TOLD_S = 0.5


@dataclass(frozen=True, slots=True)
class Violation:
    """invariant: its name, by which a shrunk plan is compared with the first."""

    invariant: str
    what: str


def of_answers(world: World, answers: Sequence[Answer]) -> Iterator[Violation]:
    """Every request has one outcome, and all tokens that came are the right ones."""
    by_name: dict[str, list[RequestLifecycle]] = {}
    for lifecycle in world.lifecycles:
        by_name.setdefault(lifecycle.request_id, []).append(lifecycle)
    for answer in answers:
        yield from _of_tokens(answer)
        yield from _of_outcome(answer, by_name.get(answer.name, []), may_be_forgotten=bool(world.lost_routers))
    for router in world.living_routers:
        counted = Counter(lifecycle.state for lifecycle in router.lifecycles)
        outcomes = router.server.parts.router.outcomes
        if counted != outcomes:
            yield Violation("outcomes", f"{router.host} counted {outcomes}, requests ended as {counted}")
    if len(world.lifecycles) != len(answers) and not world.lost_routers:
        yield Violation("outcomes", f"{len(answers)} requests were made, {len(world.lifecycles)} arrived")


def _of_tokens(answer: Answer) -> Iterator[Violation]:
    if not answer.tokens and not answer.completions:
        return
    expected = expected_tokens(answer.prompt, answer.sampling, answer.request.salt)
    told = f"{answer.name} ({answer.code}, {answer.handoff}) got {answer.tokens} of {expected}"
    if answer.tokens != expected[: len(answer.tokens)]:
        yield Violation("tokens", told)
    elif answer.code == "OK" and len(answer.tokens) != len(expected):
        yield Violation("tokens", f"incomplete: {told}")
    elif not (text := "".join(map(chr, answer.tokens))).startswith(answer.text) or (
        answer.code == "OK" and text != answer.text
    ):
        yield Violation("tokens", f"{answer.name} got the text {answer.text!r} for {answer.tokens}")
    if answer.completions and answer.completion_tokens != len(answer.tokens):
        yield Violation("tokens", f"{answer.completion_tokens} tokens were counted: {told}")


def _of_outcome(
    answer: Answer, lifecycles: Sequence[RequestLifecycle], *, may_be_forgotten: bool
) -> Iterator[Violation]:
    """may_be_forgotten: the router that counted it was killed."""
    path = [f"{state.value} -{event.value}->" for each in lifecycles for state, event in each.history]
    told = f"{answer.name} heard {answer.code} {answer.details!r}: {' '.join(path)}"
    if not answer.code:
        yield Violation("hangs", f"{answer.name} has not ended: {' '.join(path)}")
        return
    if answer.code == "OK" and (answer.completions, answer.late_events) != (1, 0):
        yield Violation("outcomes", f"{answer.completions} completions, {answer.late_events} events after: {told}")
    if answer.refusals:
        yield Violation("outcomes", f"{told}; refused: {answer.refusals}")
    allowed = _COUNTED.get(answer.code)
    if allowed is None:
        yield Violation("outcomes", f"nobody expects this: {told}")
        return
    if answer.code == "CANCELLED" and not answer.request.is_withdrawn:
        yield Violation("outcomes", f"nobody cancelled it: {told}")
    # A session is named by its `open`: one that ended before that was read keeps the name that the router gave it.
    if len(lifecycles) > 1 or not all(each.state in OUTCOMES and each.state in allowed for each in lifecycles):
        states = [each.state.value for each in lifecycles]
        yield Violation("outcomes", f"counted as {states}: {told}")
    elif not lifecycles and not may_be_forgotten and answer.code not in ("CANCELLED", "DEADLINE_EXCEEDED"):
        yield Violation("outcomes", f"it never arrived: {told}")


def of_calm(world: World, answers: Sequence[Answer]) -> Iterator[Violation]:
    """Without faults nothing fails, and every lease is pulled or given back. One may expire whose decode worker had no
    room for its request until it was too late to pull: nobody knows before that computes its prompt itself."""
    for answer in answers:
        if not _may_end_early(answer) and answer.code not in ("OK", "RESOURCE_EXHAUSTED"):
            yield Violation("calm", f"{answer.name} heard {answer.code} {answer.details!r}")
    if world.plan.has_slow_readers:
        return
    engines = [worker.engine for worker in world.workers.values() if worker.engine]
    expired = sum(engine.status().counters.handoffs_expired for engine in engines)
    too_late = sum(answer.handoff == _RECOMPUTED for answer in answers)
    if expired > too_late:
        yield Violation("calm", f"{expired} leases were left to expire, {too_late} answers were recomputed")


def _may_end_early(answer: Answer) -> bool:
    request = answer.request
    return request.is_withdrawn or request.timeout_s is not None or request.pause_s is not None


def of_survival(world: World, answers: Sequence[Answer]) -> Iterator[Violation]:
    """A request goes from a worker that hangs, drains or is killed to one that works, also in mid-stream, where one
    fault at a time meets it."""
    routers = (*world.routers.values(), *world.lost_routers)
    hopeless = {each.request_id for router in routers for each in router.lifecycles if world.had_no_chance(each)}
    for answer in answers:
        is_excused = answer.name in hopeless or _may_end_early(answer)
        if not is_excused and answer.code not in ("OK", "RESOURCE_EXHAUSTED"):
            yield Violation("survival", f"{answer.name} heard {answer.code} {answer.details!r}")


def of_poison(world: World) -> Iterator[Violation]:
    """A request ends two engines at most, and one that asks for the same after that none. Where calls break on the way
    a worker works on for a request that has left it, and one more may die of it, which its router does not hear of.
    """
    by_request = Counter(death.nonce for death in world.deaths)
    for nonce, deaths in by_request.items():
        if deaths > MOST_DEATHS + (not world.plan.has_prompt_links):
            yield Violation("poison", f"{deaths} engines died of request {nonce}")
    if not world.plan.has_prompt_links or world.lost_routers:
        return
    for wish in {death.wish for death in world.deaths}:
        deaths_of = [death for death in world.deaths if death.wish == wish]
        known_s = deaths_of[MOST_DEATHS - 1].at_s + _TOLD_S if len(deaths_of) >= MOST_DEATHS else float("inf")
        for death in deaths_of[MOST_DEATHS:]:
            if death.asked_s > known_s:
                yield Violation(
                    "poison", f"request {death.nonce} came {death.asked_s - known_s:.3f} s too late to kill"
                )


def of_sends(world: World) -> Iterator[Violation]:
    """No client keeps the router waiting for longer than it may."""
    waited_s = world.longest_wait_s
    if waited_s > SEND_TIMEOUT_S + _TOLD_S:
        yield Violation("sends", f"the router waited {waited_s:.3f} s for a client to read")


def of_cancelling(world: World) -> Iterator[Violation]:
    """Where every message arrives, no worker works for a request that has ended."""
    for what in world.unheeded if world.plan.has_prompt_links else ():
        yield Violation("cancelling", f"{what} still runs although it has ended")


def of_quiet(world: World) -> Iterator[Violation]:
    """Nothing is left of any request: no block, lease, slot or count."""
    for name, worker in world.workers.items():
        if worker.engine is None or not worker.is_ready:
            yield Violation("recovers", f"{name} does not serve")
            continue
        load = worker.engine.status().load
        if load.leased_handoffs:
            yield Violation("leases", f"{name} has {load.leased_handoffs} leases")
        if load.running_requests or load.waiting_requests or load.open_sessions:
            yield Violation("jobs", f"{name} still has jobs: {load}")
        if load.free_blocks != load.total_blocks:
            yield Violation("blocks", f"{name} has {load.free_blocks} free blocks of {load.total_blocks}")
        yield from _broken(f"blocks of {name}", worker.engine.check_invariants, "blocks")
    for router in world.living_routers:
        yield from _of_router(router.server)


def _of_router(router: RouterServer) -> Iterator[Violation]:
    for member in router.membership.members():
        if member.in_flight_requests or member.in_flight_tokens:
            counts = f"{member.in_flight_requests} requests and {member.in_flight_tokens} tokens"
            yield Violation("in flight", f"{counts} on {member.worker_id} for nobody")
    yield from _broken("membership", router.membership.check_invariants, "in flight")
    admission = router.parts.admission
    if admission.in_flight or admission.queued:
        yield Violation("in flight", f"{admission.in_flight} slots are held, {admission.queued} requests wait")
    if pending := router.parts.dispatcher.pending_releases:
        yield Violation("in flight", f"{pending} leases are still to be released")
    yield from _broken("index", router.parts.prefixes.claims.check_invariants, "index")


def _broken(name: str, check: "object", invariant: str) -> Iterator[Violation]:
    try:
        check()  # type: ignore[operator]
    except AssertionError as error:
        yield Violation(invariant, f"{name}: {error}")


def of_caches(world: World) -> Iterator[Violation]:
    """No engine has cached what is not so; also of those that are gone."""
    for worker in world.started:
        for job in worker.engine.content.poisoned if worker.engine is not None else ():
            yield Violation("caches", f"{job} left blocks at {worker.name} that hold something else than they should")


def of_defects(world: World) -> Iterator[Violation]:
    for defect in world.defects:
        yield Violation("defects", defect)
