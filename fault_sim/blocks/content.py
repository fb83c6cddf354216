"""What the runs of a `BlockEngine` write to blocks, find in them, and leave for others to find."""

from cluster_core.engine_reports import PrefixClaims
from cluster_core.token_prefix import longest_common_prefix
from fault_sim.blocks.pool import BlockPool, block_hash, first_kv, next_kv, next_token
from fault_sim.blocks.run import Run
from kv_transfer.blocks import Tier
from kv_transfer.claims.chunk_claims import ChunkClaims


class BlockContent:
    """poisoned: jobs that left blocks in the cache which hold something else than their names say."""

    def __init__(self, pool: BlockPool, claims: ChunkClaims) -> None:
        self.pool = pool
        self.claims = claims
        self.poisoned: list[str] = []
        self.size = pool.block_tokens
        pool.on_evict = lambda name: claims.removed(Tier.DEVICE, [name])

    def cached(self, run: Run) -> list[int]:
        """The blocks of its tokens that are published. Its last token is always computed."""
        full = (len(run.tokens) - 1) // self.size if run.tokens else 0
        return self.pool.match(self._names_of(run, full))

    def audit(self) -> PrefixClaims:
        return self.claims.audit(self.pool.published, ())

    def compute(self, run: Run, count: int) -> None:
        """Writes the KV of its next tokens; full blocks are found by others from now on."""
        before = self._kv(run, run.computed - 1) if run.computed else first_kv(run.job.kv_scope)
        for place in range(run.computed, run.computed + count):
            before = next_kv(before, run.tokens[place])
            self.pool.kv[run.blocks[place // self.size]][place % self.size] = before
        run.computed += count
        self._publish(run)

    def next_token(self, run: Run) -> int:
        """By all that its blocks hold."""
        return next_token([self._kv(run, place) for place in range(run.computed)], run.job.sampling, run.draws)

    def replace_prompt(self, run: Run, tokens: list[int]) -> None:
        """Keeps the KV of the longest common prefix, up to a block less where others read that block."""
        size = self.size
        # The last token is always computed: with it comes the first of the answer.
        keep = min(longest_common_prefix(run.tokens, tokens), run.computed, max(0, len(tokens) - 1))
        run.tokens = tokens
        if keep < run.computed and keep % size:
            last = run.blocks[keep // size]
            if self.pool.is_shared(last):
                keep -= keep % size
            else:
                self.pool.unpublish(last)
        run.names, run.right = run.names[: keep // size], run.right[: keep // size]
        if keep < run.computed:
            needed = -(-keep // size)
            self.pool.drop(run.blocks[needed:])
            del run.blocks[needed:]
            run.computed = keep

    def give_back(self, run: Run) -> None:
        """It holds nothing any more."""
        self.pool.drop(run.blocks)
        run.blocks = []
        run.computed = 0

    def _kv(self, run: Run, place: int) -> bytes:
        return self.pool.kv[run.blocks[place // self.size]][place % self.size]

    def _publish(self, run: Run) -> None:
        size = self.size
        full = run.computed // size
        names = self._names_of(run, full)
        for place in range(full):
            if self.pool.publish(run.blocks[place], names[place]):
                run.has_published = True
                self._check_content(run, place)
                tokens = run.tokens[place * size : (place + 1) * size]
                parent = names[place - 1] if place else None
                job = run.job
                adapter = job.adapter.digest if job.adapter is not None else ""
                self.claims.stored(Tier.DEVICE, [names[place]], parent, tokens, job.cache_salt, adapter)

    def _check_content(self, run: Run, place: int) -> None:
        """A run that finds a block by its name has to find what the name says."""
        size, end = self.size, (place + 1) * self.size
        if len(run.right) * size < end:
            kv = run.right[-1] if run.right else first_kv(run.job.kv_scope)
            for position in range(len(run.right) * size, end):
                kv = next_kv(kv, run.tokens[position])
                if (position + 1) % size == 0:
                    run.right.append(kv)
        if self._kv(run, end - 1) != run.right[place]:
            self.poisoned.append(run.job.request_id)

    def _names_of(self, run: Run, blocks: int) -> list[bytes]:
        size = self.size
        while len(run.names) < blocks:
            place = len(run.names) * size
            parent = run.names[-1] if run.names else None
            run.names.append(block_hash(parent, run.tokens[place : place + size], run.job.kv_scope))
        return run.names[:blocks]
