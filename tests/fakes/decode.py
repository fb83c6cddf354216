"""The batch of a fake decode engine: everything runs at once, and prefixes are compared token by token in chunks."""

from collections import Counter
from itertools import takewhile

from cluster_core.engine_jobs import EngineJob
from cluster_core.engine_reports import DecodeBatch, DecodeReport, PolicyRow, PrefixGroup

CHUNK_TOKENS = 4


class FakeDecode:
    def __init__(self) -> None:
        self._prompts: dict[str, tuple[int, ...]] = {}
        self._admissions: Counter[str] = Counter()
        self._lost_tokens = 0
        self._steps = self._batch_sum = self._shared_tokens_sum = 0

    def joined(self, job: EngineJob) -> None:
        before = self._tip_tokens()
        self._admissions["policy" if self._prompts else "idle"] += 1
        self._prompts[job.request_id] = job.token_ids
        if len(self._prompts) > 1:
            self._lost_tokens += before - self._tip_tokens()

    def left(self, job: EngineJob) -> None:
        self._prompts.pop(job.request_id, None)

    def stepped(self) -> None:
        self._steps += 1
        self._batch_sum += len(self._prompts)
        self._shared_tokens_sum += self._tip_tokens()

    def report(self) -> DecodeReport:
        chunks = {prompt[:end] for prompt in self._prompts.values() for end in _ends(prompt)}
        return DecodeReport(
            policy="greedy",
            mode="policy",
            running_requests=len(self._prompts),
            loading_requests=0,
            tip_tokens=self._tip_tokens(),
            working_set_tokens=len(chunks) * CHUNK_TOKENS,
            waiting={"capacity": 0, "held": 0, "prefix": 0, "share": 0},
            steps=self._steps,
            batch_sum=self._batch_sum,
            shared_tokens_sum=self._shared_tokens_sum,
            admissions=dict(self._admissions),
            lost_tokens=self._lost_tokens,
            wait_s={"capacity": 0.0, "held": 0.0, "prefix": 0.0, "share": 0.0},
            longest_held_s=0.0,
            decisions=self._admissions["policy"],
            decision_s=0.0,
            probes=0,
            fallbacks=0,
        )

    def batch(self, at_most: int) -> DecodeBatch:
        by_first_chunk: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for prompt in self._prompts.values():
            by_first_chunk.setdefault(prompt[:CHUNK_TOKENS], []).append(prompt)
        largest = sorted(by_first_chunk.items(), key=lambda group: len(group[1]), reverse=True)[:at_most]
        groups = tuple(
            PrefixGroup(bytes(token % 256 for token in first).hex(), _shared_tokens(prompts), len(prompts), 0)
            for first, prompts in largest
        )
        return DecodeBatch(groups, table=(PolicyRow("1+", "0", "0", self._admissions["policy"], 0, None, None),))

    def _tip_tokens(self) -> int:
        return _shared_tokens(list(self._prompts.values()))


def _ends(prompt: tuple[int, ...]) -> range:
    return range(CHUNK_TOKENS, len(prompt) + 1, CHUNK_TOKENS)


def _shared_tokens(prompts: list[tuple[int, ...]]) -> int:
    """Of all of them, in whole chunks."""
    same = sum(1 for _ in takewhile(lambda tokens: len(set(tokens)) == 1, zip(*prompts, strict=False)))
    return same - same % CHUNK_TOKENS
