"""Prefill deflection as published (arXiv:2607.02043), for workers that do both, to be compared with. Pure.

Prefill-heavy workers are its prefill nodes, the others its decode nodes, whose chunks of prompts are as large as keeps
what decodes there within TPOT. A request is expected to have its first token
    on a prefill node    after the queue, its own prefill and the transfer of its KV
    on a decode node     after the queue and its own prefill, at the share of time that decodes leave; no transfer
and goes where that is soonest; not to a decode node whose steps would be too long with it. The paper refuses nothing
(`BothRules.refuses`).
Which decode node gets what was prefilled apart the paper leaves to the scheduler: it is bound at the first token.
"""

import numpy as np

from control_plane.placement.by_objective import BothView, Choice, Objectives, Way, share_for_prompts


def choices(view: BothView, objectives: Objectives) -> list[Choice]:
    """All that there are, soonest first; ties by row."""
    phi = share_for_prompts(view.step_s, objectives)
    apart_s = view.wait_s + view.queue_s + view.own_s + view.pull_s
    deflected_s = view.wait_s + (view.queue_s + view.own_s) / phi
    is_full = view.step_with_s > objectives.step_s
    found = []
    for row in np.flatnonzero(view.passes).tolist():
        heavy = bool(view.is_prefill_heavy[row])
        ttft_s, way = (float(apart_s[row]), Way.APART) if heavy else (float(deflected_s[row]), Way.WHOLE)
        missed = int(ttft_s > objectives.planned_ttft_s) + int(not heavy and is_full[row])
        takes = ttft_s, float(view.own_s[row] / (1.0 if heavy else phi[row])), float(view.step_with_s[row])
        found.append(Choice(row, view.workers[row], way, *takes, missed, ttft_s, objectives.planned_ttft_s))
    # Full decode nodes come last: where there is nobody else, they are who there is.
    found.sort(key=lambda choice: (choice.way is Way.WHOLE and bool(is_full[choice.row]), choice.ttft_s))
    return found
