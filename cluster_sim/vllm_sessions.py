"""The prefill pool's engine in simulated time, with sessions whose prompt arrives while it is prefilled.

Source of what they are: Stream2LLM (arXiv:2604.16395), section 4; `prefill_worker.engine_scheduler`, which runs here.
"""

from collections.abc import Sequence

from cluster_core.engine import SessionMode, SessionRecord
from cluster_sim.costs import CostModel
from cluster_sim.engine import SimJob
from cluster_sim.vllm_engine import Entry, VllmSimEngine
from cluster_sim.vllm_schedulers import VllmEngineSettings
from kv_transfer.prefix_chunks import Keys


class SessionSimEngine(VllmSimEngine):
    """For settings of the kind STREAMING. A session's outcomes are those of a job; `records` has what happened to those
    that have ended, until somebody takes it.

    keys: of the whole prompt as it is then; where they are not given, nothing of it is found in the prefix cache.
    """

    def __init__(self, cost_model: CostModel, settings: VllmEngineSettings) -> None:
        super().__init__(cost_model, settings)
        self.records: dict[int, SessionRecord] = {}

    def open(self, job: SimJob, tokens: Sequence[int], mode: SessionMode, now_s: float) -> None:
        """The job's prompt as far as it is known, which may be empty; its keys are those of that."""
        self._take(now_s, lambda: self._scheduler.open_session(self._request(job, list(tokens)), mode))

    def extend(self, number: int, tokens: Sequence[int], now_s: float, keys: Keys | None = None) -> None:
        self._input(number, keys, now_s, "extend_prompt", tokens)

    def replace(self, number: int, tokens: Sequence[int], now_s: float, keys: Keys | None = None) -> None:
        self._input(number, keys, now_s, "replace_prompt", tokens)

    def close(self, number: int, tokens: Sequence[int], now_s: float, keys: Keys | None = None) -> None:
        """The prompt ends with these tokens."""
        self._input(number, keys, now_s, "close_input", tokens)

    def _input(self, number: int, keys: Keys | None, now_s: float, method: str, tokens: Sequence[int]) -> None:
        def give() -> None:
            entry = self._entries.get(str(number))
            if entry is None:
                return
            if entry.names is not None:
                entry.names.known(keys)
            getattr(self._scheduler, method)(str(number), tokens)

        self._take(now_s, give)

    def _vain_steps(self) -> int:
        # Who is refused goes last the next time, so one after the other may have to be.
        return super()._vain_steps() + int(self._scheduler.session_count)

    def _ended(self, name: str, entry: Entry) -> None:
        super()._ended(name, entry)
        record = self._scheduler.take_session_record(name)
        if record is not None:
            self.records[entry.job.number] = record
