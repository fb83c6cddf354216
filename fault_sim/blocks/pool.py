"""Blocks of KV with content, and what a model without weights makes of it.

The KV of a token is a digest of the KV before it and of the token; the next token is a digest of all KV that the blocks
of its request hold at that moment. So an answer is right only when every block held what it should, and
`expected_tokens` says what is right without any blocks. KV also depends on salt and adapter (`EngineJob.kv_scope`): a
request that computes under another's gives itself away.

Who holds a block:
    refs > 0               its holders: requests, leases; nothing else writes to it
    refs 0, published      the cache: it is found by its hash, until it is allocated
    refs 0                 nobody; what it holds stays until it is written to
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from cluster_core.engine_jobs import SamplingSpec

BlockHash = bytes
Kv = bytes


def first_kv(scope: str) -> Kv:
    """What stands before the first token."""
    return _digest(b"root", scope.encode())


def next_kv(before: Kv, token: int) -> Kv:
    return _digest(before, token.to_bytes(4, "little"))


def next_token(kv: Iterable[Kv], sampling: SamplingSpec, draws: int) -> int:
    """What follows these tokens: the code of a lower-case letter. draws: that its generator has made before."""
    drawn = (sampling.seed, draws) if sampling.temperature and sampling.seed is not None else None
    return ord("a") + int.from_bytes(_digest(b"".join(kv), repr(drawn).encode()), "little") % 26


def expected_tokens(prompt: Sequence[int], sampling: SamplingSpec, scope: str = "") -> list[int]:
    """What a cluster has to answer, up to max_tokens."""
    kv: list[Kv] = []
    generated: list[int] = []
    for token in prompt:
        kv.append(next_kv(kv[-1] if kv else first_kv(scope), token))
    while len(generated) < sampling.max_tokens:
        generated.append(next_token(kv, sampling, len(generated)))
        kv.append(next_kv(kv[-1], generated[-1]))
    return generated


def block_hash(parent: BlockHash | None, tokens: Sequence[int], scope: str) -> BlockHash:
    """Of a full block, with all before it."""
    return _digest(parent or first_kv(scope), repr(list(tokens)).encode())


def _digest(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=8).digest()


class BlockPool:
    """kv: what each block holds, by block and place in it. on_evict: gets the names of published blocks that go."""

    def __init__(self, blocks: int, block_tokens: int) -> None:
        self.total = blocks
        self.block_tokens = block_tokens
        self.kv: list[list[Kv]] = [[b""] * block_tokens for _ in range(blocks)]
        self.on_evict: Callable[[BlockHash], None] = lambda name: None
        self._refs = [0] * blocks
        self._names: list[BlockHash | None] = [None] * blocks
        self._published: dict[BlockHash, int] = {}
        # Next to be allocated first.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def published(self) -> frozenset[BlockHash]:
        return frozenset(self._published)

    def match(self, names: Iterable[BlockHash]) -> list[int]:
        """The blocks of the longest prefix that is published."""
        found = []
        for name in names:
            block = self._published.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def take(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._free.pop(block, None)
            self._refs[block] += 1

    def allocate(self) -> int | None:
        """A block to write to; None where all are held."""
        if not self._free:
            return None
        block, _ = self._free.popitem(last=False)
        self.unpublish(block)
        self._refs[block] = 1
        return block

    def drop(self, blocks: Sequence[int]) -> None:
        """The last ones are allocated again first."""
        for block in reversed(blocks):
            self._refs[block] -= 1
            assert self._refs[block] >= 0, f"block {block} was given back twice"
            if not self._refs[block]:
                self._free[block] = None

    # As vLLM's pool has them, for `kv_transfer.handoff.overdue_pulls`.

    touch = take

    def free_blocks(self, blocks: Iterable[int]) -> None:
        """They come in the order in which they are to be allocated again."""
        self.drop(list(blocks)[::-1])

    # Names of full blocks.

    def publish(self, block: int, name: BlockHash) -> bool:
        """False where a block of that name is published already."""
        if name in self._published or self._names[block] is not None:
            return False
        self._published[name] = block
        self._names[block] = name
        return True

    def unpublish(self, block: int) -> None:
        name = self._names[block]
        if name is not None:
            self._names[block] = None
            del self._published[name]
            self.on_evict(name)

    def is_held(self, block: int) -> bool:
        return self._refs[block] > 0

    def is_shared(self, block: int) -> bool:
        return self._refs[block] > 1

    def check_invariants(self, held: Iterable[Sequence[int]]) -> None:
        """held: the blocks of each holder."""
        refs = [0] * self.total
        for blocks in held:
            for block in blocks:
                refs[block] += 1
        assert refs == self._refs, "blocks are held by nobody, or not counted"
        assert set(self._free) == {block for block, count in enumerate(refs) if not count}, "free blocks are lost"
        assert all(self._names[block] == name for name, block in self._published.items())
