"""How much memory the prompts of all requests and sessions of a router may take. What does not fit is refused.

Requests are counted as well (`admission`); a few of them with prompts of a million tokens are as much as thousands.
Best effort and each tenant have a part of it at most, the same as of the slots, so that what only waits keeps nobody
out whom a slot would be given to before. A prompt that is the only one of its kind may take all.

The hint that goes with a refusal is the time until so much comes back, as long as prompts have lately been held,
between 100 ms and 30 s.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cluster_core.clock import monotonic_s
from cluster_core.errors import OverloadedError
from cluster_core.tenant_shares import Claimant
from control_plane.model.memory_use import MemoryUse

# A list's place and Python's number, the message it came in, and the packed copy.
TOKEN_BYTES = 48
_LIMIT = "router.max_prompt_mib"
_PACE_WEIGHT = 0.1
_ANYBODY = Claimant()


class PromptMemory:
    """Of one router. Of limit_bytes, what may be had by one tenant: tenant_share; by best effort: best_effort_share."""

    def __init__(
        self,
        limit_bytes: int,
        tenant_share: float = 1.0,
        best_effort_share: float = 1.0,
        now_s: Callable[[], float] = monotonic_s,
    ) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._most_of_tenant = int(limit_bytes * tenant_share)
        self._most_best_effort = int(limit_bytes * best_effort_share)
        self._now_s = now_s
        self._best_effort = 0
        # By tenant.
        self._used: Counter[str] = Counter()
        # Of a prompt, lately: bytes, and bytes times the seconds that they were held.
        self._recent_bytes = 0.0
        self._recent_byte_s = 0.0

    @contextmanager
    def holding(self, tokens: int = 0, claimant: Claimant = _ANYBODY) -> Iterator["HeldPrompt"]:
        """One prompt, while the block runs. Raises OverloadedError where it does not fit."""
        held, began_s = HeldPrompt(self, claimant), self._now_s()
        held.resize(tokens)
        try:
            yield held
        finally:
            self._note_pace(held.bytes, self._now_s() - began_s)
            held.resize(0)

    def use(self) -> MemoryUse:
        return MemoryUse("prompts", self.used_bytes, self.limit_bytes, _LIMIT)

    def take(self, claimant: Claimant, wanted: int, had: int) -> None:
        """Of a prompt that had so many bytes before. Raises OverloadedError, and changes nothing."""
        more = wanted - had
        if more > 0:
            self._look(wanted, self.used_bytes - had, self.limit_bytes, "prompts", _LIMIT)
            if claimant.is_best_effort:
                others, most = self._best_effort - had, self._most_best_effort
                self._look(wanted, others, most, "best effort's prompts", "router.best_effort_share")
            others, most = self._used[claimant.tenant] - had, self._most_of_tenant
            self._look(wanted, others, most, "this tenant's prompts", "router.tenant_share")
        self.used_bytes += more
        self._best_effort += more * claimant.is_best_effort
        self._used[claimant.tenant] += more
        if not self._used[claimant.tenant]:
            del self._used[claimant.tenant]

    def check_invariants(self) -> None:
        assert self.used_bytes == self._used.total(), "somebody's prompts are miscounted"
        assert all(used > 0 for used in self._used.values()), "somebody is known who has no prompt"
        assert 0 <= self._best_effort <= self.used_bytes <= self.limit_bytes, "prompts are miscounted"

    def _look(self, wanted: int, others: int, most: int, whose: str, limit: str) -> None:
        """Beside what others take. Raises OverloadedError."""
        if wanted + others <= most or (not others and wanted <= self.limit_bytes):
            return
        used_mib, most_mib, wanted_mib = (each / (1 << 20) for each in (others, most, wanted))
        # One that is larger than its part waits for all others of its kind.
        missing = min(others, others + wanted - most)
        raise OverloadedError(
            f"{whose} take {used_mib:.1f} of {most_mib:.1f} MiB, {wanted_mib:.1f} MiB do not fit, see {limit}",
            retry_after_ms=self._retry_after_ms(missing, others) if wanted <= self.limit_bytes else None,
        )

    def _retry_after_ms(self, missing: int, others: int) -> int:
        """Until so much of what others take has come back."""
        held_s = self._recent_byte_s / self._recent_bytes if self._recent_bytes else 1.0
        return round(min(max(held_s * missing / others * 1000, 100), 30_000))

    def _note_pace(self, held_bytes: int, held_s: float) -> None:
        self._recent_bytes += _PACE_WEIGHT * (held_bytes - self._recent_bytes)
        self._recent_byte_s += _PACE_WEIGHT * (held_bytes * held_s - self._recent_byte_s)


class HeldPrompt:
    """A prompt that may still grow, shrink or be replaced. bytes: that it takes."""

    def __init__(self, memory: PromptMemory, claimant: Claimant = _ANYBODY) -> None:
        self._memory = memory
        self._claimant = claimant
        self.bytes = 0

    def belongs_to(self, claimant: Claimant) -> None:
        """Whose it is, which is known once it has come."""
        assert not self.bytes, "it is held for somebody else"
        self._claimant = claimant

    def resize(self, tokens: int) -> None:
        """It has so many tokens now. Raises OverloadedError, and changes nothing, where these do not fit."""
        wanted = tokens * TOKEN_BYTES
        self._memory.take(self._claimant, wanted, self.bytes)
        self.bytes = wanted
