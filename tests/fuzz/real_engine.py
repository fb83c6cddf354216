"""Random sessions through one real prefill engine in fp32, against fresh requests with the final prompt.

The engine is stepped by hand, so that a seed plays the same world again. Each answer is compared twice: with a fresh
request that reads no cache, and with one that may hit whatever the sessions have published.
"""

import os
import random
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from cluster_configs.schema import EngineSection, HandoffSection, ModelSection, StreamingSection
from cluster_core.engine import EngineJob, SamplingSpec, SessionMode
from kv_transfer import vllm_private
from worker_runtime.engine_settings import EngineRole, EngineSettings, engine_environment

BLOCKS = 36
MODEL_LEN = 1024
SWAP_GIB = 0.002
_VOCABULARY = 256


@dataclass(slots=True)
class RealTally:
    checked: int = 0
    wrong: list[str] = field(default_factory=list)
    cancelled: int = 0
    appends: int = 0
    updates: int = 0
    swaps: int = 0
    recomputes: int = 0
    invalidated_tokens: int = 0


class RealEngine:
    """A prefill engine as workers start it, with a tiny pool; stepped by `step`."""

    def __init__(self, policy: str, preemption: str) -> None:
        engine = EngineSection(kv_blocks=BLOCKS, max_model_len=MODEL_LEN, max_batched_tokens=192, max_running_requests=5)
        streaming = StreamingSection.model_validate(
            {"policy": policy, "preemption": preemption, "host_swap_gib": SWAP_GIB, "starvation_s": 0.2}
        )
        settings = EngineSettings(ModelSection(), engine, HandoffSection(), EngineRole.PREFILL, streaming)
        os.environ.update(engine_environment(settings))
        from vllm.v1.engine.llm_engine import LLMEngine

        from worker_runtime.vllm_arguments import engine_args

        self.engine = LLMEngine.from_engine_args(engine_args(settings))
        self.scheduler: Any = vllm_private.scheduler_of(self.engine)
        self.answers: dict[str, list[int]] = defaultdict(list)

    def params(self, max_tokens: int, *, reads_cache: bool = True) -> Any:
        from worker_runtime.vllm_conversion import sampling_params

        job = EngineJob("", (), SamplingSpec(max_tokens=max_tokens, temperature=0.0, ignore_eos=True))
        params = sampling_params(job, 1.0)
        params.skip_reading_prefix_cache = not reads_cache
        return params

    def step(self, turns: int) -> None:
        for _ in range(turns):
            if not self.scheduler.has_requests():
                return
            for output in self.engine.step():
                self.answers[output.request_id.split("-")[0]].extend(output.outputs[0].token_ids)

    def fresh(self, name: str, prompt: list[int], max_tokens: int, *, reads_cache: bool) -> None:
        params = self.params(max_tokens, reads_cache=reads_cache)
        self.engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)

    def idle_and_whole(self) -> None:
        """Raises AssertionError unless every block and host slot is back."""
        assert not self.scheduler.requests
        assert vllm_private.block_counts(self.engine) == (BLOCKS - 1, BLOCKS - 1)
        assert self.scheduler.swaps.free_slots == self.scheduler.swaps.slots

    def close(self) -> None:
        self.engine.engine_core.shutdown()


class _Trial:
    """A few sessions at once, then the comparison."""

    def __init__(self, real: RealEngine, rng: random.Random, tally: RealTally, number: int) -> None:
        self.real, self.rng, self.tally, self.number = real, rng, tally, number
        self.bases = [self._tokens(500) for _ in range(2)]

    def run(self, sessions: int) -> None:
        from worker_runtime.engine_sessions import SessionPrompt

        rng, real = self.rng, self.real
        prompts: dict[str, tuple[Any, list[int], int]] = {}
        done: dict[str, tuple[list[int], int]] = {}
        internal: dict[str, str] = {}
        for index in range(sessions):
            name, max_tokens = f"t{self.number}x{index}", rng.choice((1, 1, 4))
            prompt = self._prompt()
            job = EngineJob(name, tuple(prompt), SamplingSpec(max_tokens=max_tokens))
            session = SessionPrompt(real.engine, job, rng.choice(list(SessionMode)), real.params(max_tokens))
            prompts[name], internal[name] = (session, prompt, max_tokens), session.internal_id
            if rng.random() < 0.5:
                real.step(rng.randrange(3))
        while prompts:
            name = rng.choice(list(prompts))
            session, prompt, max_tokens = prompts[name]
            chance = rng.random()
            if chance < 0.35:
                prompts[name] = (session, self._append(session, prompt), max_tokens)
            elif chance < 0.7:
                prompts[name] = (session, self._update(session, prompt), max_tokens)
            elif chance < 0.73:
                del prompts[name]
                session.abort()
                self.tally.cancelled += 1
            elif chance < 0.9:
                closing = self._tokens(rng.choice((0, 0, 1, 30)))
                if prompt + closing:
                    session.close(closing)
                    done[name] = (prompt + closing, max_tokens)
                    del prompts[name]
            real.step(rng.randrange(4))
        real.step(2000)
        self._count(done, internal)
        self._compare(done)
        real.idle_and_whole()

    def _append(self, session: Any, prompt: list[int]) -> list[int]:
        piece = self._tokens(self.rng.choice((0, 1, 1, 20, 150)))
        if len(prompt) + len(piece) > MODEL_LEN - 40:
            return prompt
        session.take_in(piece, replaces=False)
        self.tally.appends += 1
        return prompt + piece

    def _update(self, session: Any, prompt: list[int]) -> list[int]:
        kept = self.rng.randrange(len(prompt) + 1) if self.rng.random() < 0.8 else len(prompt)
        changed = prompt[:kept] + self._tokens(self.rng.choice((0, 0, 1, 40, 200)))
        changed = changed[: MODEL_LEN - 40]
        session.take_in(changed, replaces=True)
        self.tally.updates += 1
        return changed

    def _count(self, done: dict[str, tuple[list[int], int]], internal: dict[str, str]) -> None:
        for name in done:
            record = self.real.scheduler.take_session_record(internal[name])
            self.tally.swaps += record.preemptions_swap
            self.tally.recomputes += record.preemptions_recompute
            self.tally.invalidated_tokens += record.tokens.invalidated_tokens

    def _compare(self, done: dict[str, tuple[list[int], int]]) -> None:
        answers = {name: self.real.answers.pop(name, []) for name in done}
        for reads_cache in (False, True):
            for name, (prompt, max_tokens) in done.items():
                self.real.fresh(name, prompt, max_tokens, reads_cache=reads_cache)
            self.real.step(2000)
            for name in done:
                fresh = self.real.answers.pop(name)
                if fresh != answers[name]:
                    kind = "one that read the cache" if reads_cache else "a fresh one"
                    self.tally.wrong.append(f"{name}: {answers[name]}, {kind} gave {fresh}")
        self.tally.checked += len(done)

    def _prompt(self) -> list[int]:
        base = self.rng.choice(self.bases)
        return base[: self.rng.randrange(len(base))] + self._tokens(self.rng.randrange(0, 120))

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(_VOCABULARY) for _ in range(count)]


def play(real: RealEngine, sessions: int, seed: int) -> RealTally:
    """At least so many sessions, a few at a time. Raises AssertionError when blocks are lost or nothing moves."""
    rng, tally, number = random.Random(seed), RealTally(), 0
    while tally.checked < sessions:
        _Trial(real, rng, tally, number).run(rng.randrange(3, 15))
        number += 1
    return tally
