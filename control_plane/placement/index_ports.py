"""The prefix index as placement uses it: what it holds, whether it can be believed, and where accesses go."""

from collections.abc import Callable
from dataclasses import dataclass

from cluster_core.clock import unix_ms
from control_plane.prefix_index.index import PrefixIndex
from kv_transfer.claims.prefix_chunks import Keys


@dataclass(frozen=True, slots=True)
class IndexPorts:
    """One router's index and what belongs to it."""

    index: PrefixIndex
    # Whether the index is too old to be believed.
    is_stale: Callable[[], bool] = lambda: False
    # Now, on the clock of hotness: Redis's time.
    now_s: Callable[[], float] = lambda: unix_ms() / 1000
    # Takes the chunks of each request's prompt, once.
    record_access: Callable[[Keys], None] = lambda keys: None
