"""All that placements leave behind in a router."""

from typing import Any

from control_plane.fleet.membership import Membership
from control_plane.placement.ledger import Ledger
from control_plane.placement.placer import Placer
from control_plane.prefix_index.index import PrefixIndex


def ledger_of(placer: Placer) -> Ledger:
    # The placer's ledger, which has no other reader.
    return placer._ledger


def left_behind(placer: Placer, index: PrefixIndex, membership: Membership) -> dict[str, Any]:
    """Equal where nothing has changed."""
    ledger = ledger_of(placer)
    # All state, private or not: a side effect that no public reading shows is the one to find.
    rng, table, loads = placer._rng, index._table, membership.loads._columns
    sets, predictions, running = index._sets, index._predictions, ledger.running._by_key
    works, prompts = ledger.long_prompts._works, ledger.recent._prompts
    return {
        "rng": rng.getstate(),
        "counts": repr(ledger.counts),
        "log": {name: repr(ledger.log.explanation(name)) for name in ledger.log.request_ids()},
        "long prompts": (list(works), ledger.long_prompts.long_s),
        "recent": [prompt.keys.tolist() for prompt in prompts],
        "running": repr(running),
        "loads": loads.tolist(),
        "index": (table.keys.tolist(), table.sets.tolist(), table.heat.tolist()),
        "sets": len(sets),
        "predictions": len(predictions),
    }
