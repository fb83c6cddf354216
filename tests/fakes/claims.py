"""What a fake engine has cached and tells of: the prompts that it has finished, until a test drops them."""

import hashlib
from collections.abc import Callable, Sequence

from cluster_core.engine_jobs import kv_scope
from cluster_core.engine_reports import PrefixClaimChange, PrefixClaims
from kv_transfer.blocks import Tier
from kv_transfer.claims.chunk_claims import ChunkClaims
from kv_transfer.claims.prefix_chunks import root_key


class FakeClaims:
    """`device`, `host`: the blocks that lie there."""

    def __init__(self, block_tokens: int, chunk_tokens: int, service_id: str) -> None:
        self._block_tokens = block_tokens
        self.claims = ChunkClaims(
            lambda salt, adapter: root_key(service_id, salt, adapter), block_tokens, -(-chunk_tokens // block_tokens)
        )
        self._on_change: Callable[[PrefixClaimChange], None] = lambda change: None
        self.device: set[bytes] = set()
        self.host: set[bytes] = set()

    def cache(self, prompt: Sequence[int], salt: str = "", tier: Tier = Tier.DEVICE, *, adapter: str = "") -> int:
        """The full blocks of a prompt lie in a tier from now on. Returns how many of them are new there."""
        hashes = self._hashes(prompt, kv_scope(salt, adapter))
        known = self._blocks(tier)
        new = len(set(hashes) - known)
        known.update(hashes)
        self.claims.stored(tier, hashes, None, prompt[: len(hashes) * self._block_tokens], salt, adapter)
        self._tell()
        return new

    def drop(self, prompt: Sequence[int], salt: str = "", tier: Tier = Tier.DEVICE, *, first_block: int = 0) -> None:
        """The blocks of a prompt from this one on leave a tier."""
        hashes = self._hashes(prompt, salt)[first_block:]
        self._blocks(tier).difference_update(hashes)
        self.claims.removed(tier, hashes)
        self._tell()

    def follow(self, on_change: Callable[[PrefixClaimChange], None]) -> None:
        self._on_change = on_change
        claims = self.claims.claims()
        on_change(PrefixClaimChange(dict.fromkeys(claims.device, True), dict.fromkeys(claims.host, True)))

    def audit(self) -> PrefixClaims:
        return self.claims.audit(self.device, self.host)

    def _blocks(self, tier: Tier) -> set[bytes]:
        return self.device if tier is Tier.DEVICE else self.host

    def _tell(self) -> None:
        change = self.claims.take()
        if change:
            self._on_change(change)

    def _hashes(self, prompt: Sequence[int], salt: str) -> list[bytes]:
        """Of its full blocks; each covers all before it."""
        ends = range(self._block_tokens, len(prompt) + 1, self._block_tokens)
        return [hashlib.blake2b(repr((salt, *prompt[:end])).encode(), digest_size=16).digest() for end in ends]
