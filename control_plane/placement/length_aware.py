"""TaiChi's length-aware prefill scheduling (arXiv:2508.01989), for workers that do both, to be compared with. Pure.

Prefill-heavy workers have first tokens soon, decode-heavy ones keep decodes undisturbed and take longer over prompts.
A prompt that a decode-heavy worker has in time, within TTFT, goes there, although a prefill-heavy one would have it
sooner: those are kept for the prompts that only they have in time. Where nobody has it in time it goes where it is
soonest. What is expected of a worker, and whose decodes are full, is as in `deflection`.

Its other half, decodes that flow to prefill-heavy workers while memory is short and back before TPOT is missed, is not
here: an answer stays where it is bound. The paper refuses nothing (`BothRules.refuses`).
"""

from control_plane.placement import deflection
from control_plane.placement.by_objective import BothView, Choice, Objectives, Way


def choices(view: BothView, objectives: Objectives) -> list[Choice]:
    """All that there are, in that order; among equals the soonest first, ties by row."""

    def rank(choice: Choice) -> tuple[bool, bool, bool]:
        is_decode_heavy = choice.way is Way.WHOLE
        is_late = choice.ttft_s > objectives.planned_ttft_s
        return is_decode_heavy and choice.step_s > objectives.step_s, is_late, not (is_late or is_decode_heavy)

    return sorted(deflection.choices(view, objectives), key=rank)
