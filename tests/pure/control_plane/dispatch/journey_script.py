"""Journeys as text: the left column is what happens, the right one what the journey answers.

`python -m tests.pure.control_plane.dispatch.journey_script` writes the right column of `journeys.txt` again, on purpose
only: a changed line is a changed decision. A story begins with a line `# title`, its settings follow as `name=value`.
"""

from pathlib import Path

from control_plane.dispatch import journey_steps as steps
from control_plane.dispatch.journey import Journey, JourneyLimits
from control_plane.model.job import NO_HANDOFF, RECOMPUTED
from tests.pure.control_plane.dispatch.played_journey import PULLED, new_job, worker

FILE = Path(__file__).with_name("journeys.txt")
_WIDTH = 40
_HANDOFFS = {"pulled": PULLED, "recomputed": RECOMPUTED, "nothing": NO_HANDOFF}


def rendered(text: str) -> str:
    """The same stories with the answers of the journey as it is."""
    lines: list[str] = []
    journey: Journey | None = None
    for line in text.splitlines():
        happens = line.partition("->")[0].strip()
        if not happens or happens.startswith("#"):
            journey = None
            lines.append(happens)
        elif "=" in happens.split()[0]:
            journey = _journey(happens)
            lines.append(happens)
        else:
            journey = journey or _journey("")
            at, _, what = happens.partition(" ")
            answers = [_told(each) for each in journey.handle(_event(what), float(at))]
            lines += _columns(happens, answers or ["-"])
    return "\n".join(lines) + "\n"


def _columns(happens: str, answers: list[str]) -> list[str]:
    first, *others = answers
    return [f"{happens:<{_WIDTH}}-> {first}", *(f"{'':<{_WIDTH}}-> {other}" for other in others)]


def _journey(options: str) -> Journey:
    given = dict(option.split("=") for option in options.split())
    limits = JourneyLimits(int(given.get("prefill_attempts", 2)), 30.0, 15.0)
    job = new_job(max_tokens=int(given.get("max_tokens", 8)), deadline_s=float(given.get("deadline_s", 600)))
    return Journey(job, limits)


def _event(what: str) -> steps.Event:
    word, *rest = what.split()
    match word:
        case "begun":
            return steps.Begun()
        case "placed":
            chosen = worker(rest[0]) if rest[0] != "nowhere" else None
            return steps.Placed(chosen, "growing" not in rest, "no-decode-pool" not in rest)
        case "prompt-complete":
            return steps.PromptComplete()
        case "prefilled":
            return steps.Prefilled(
                rest[0] if rest[:1] == ["next"] else "first", (1,), 1, 1 if "whole-answer" in rest else None
            )
        case "started":
            return steps.DecodeStarted(_HANDOFFS[rest[0]])
        case "generated":
            return steps.Generated("delta", (2,), 1)
        case "ended":
            return steps.Ended(1, 8)
        case "lost":
            words = {
                "is_draining": "draining",
                "has_died": "dead",
                "has_stalled": "hangs",
                "is_unreachable": "unreached",
            }
            return steps.WorkerLost("no answer", **{name: word in rest for name, word in words.items()})
        case "handed-over":
            return steps.HandedOver(rest[0])
        case "closed":
            return steps.Closed()
    raise ValueError(f"no event is called `{word}`")


def _told(instruction: steps.Instruction) -> str:
    match instruction:
        case steps.Route():
            return "route"
        case steps.PlacePrefill(excluded):
            return f"place for prefill, without {_names(excluded)}"
        case steps.PlaceDecode(excluded, prefills, wait_s, _, avoided):
            prompt = ", to compute the prompt" if prefills else ""
            without = f", without {_names(excluded)}" if excluded else ""
            rather = f", rather without {_names(avoided)}" if avoided else ""
            return f"place for decode, wait {wait_s:g} s at most{prompt}{without}{rather}"
        case steps.AwaitPrompt():
            return "await the whole prompt"
        case steps.CallPrefill(chosen, lease_id, hand_off, _):
            return f"call {chosen.worker_id} as {lease_id}{', keep the KV' if hand_off else ''}"
        case steps.CallDecode(chosen, request_id, pulls):
            return f"call {chosen.worker_id} as {request_id}{', pull the KV' if pulls else ''}"
        case steps.CountPrompt():
            return "count the prompt"
        case steps.Emit(piece):
            return f"emit {piece}"
        case steps.Suspect(chosen, _):
            return f"suspect {chosen.worker_id}"
        case steps.Blame():
            return "blame the request"
        case steps.MarkDraining(chosen):
            return f"mark {chosen.worker_id} as draining"
        case steps.Release(lease):
            when = f"at {lease.safe_at_s:g}" if lease.safe_at_s else "now"
            return f"release {lease.lease_id} at {lease.worker.worker_id} {when}"
        case steps.Complete():
            return "complete"
        case steps.Fail(cause, sentence, retry_after_ms):
            retry = f", retry after {retry_after_ms} ms" if retry_after_ms else ""
            return f"fail: {cause.value}: {sentence}{retry}"


def _names(excluded: steps.Excluded) -> str:
    return " ".join(sorted(name for name, _ in excluded))


if __name__ == "__main__":
    stories = [line for line in FILE.read_text().splitlines() if line.partition("->")[0].strip() or not line]
    FILE.write_text(rendered("\n".join(stories)))
