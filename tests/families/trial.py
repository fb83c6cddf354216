"""One family through a whole service: what it can have, shown by tokens that are those of a plain vLLM."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rachis import AsyncClient, Generated, NotSupportedError, token_prompt
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire

from benchmarks.direct_call import DirectWorker
from benchmarks.kept_command import KeptCommand
from benchmarks.plain_engine import GENERATION, plain_engine
from cluster_configs.loading import load
from cluster_core.errors import StartError
from command_line.own_service import own_settings
from tests.families.tiny_models import VOCABULARY, Family, write_model

YES = "yes"
# Columns of the table, in its order; the names of those that a model can be without are those of
# `kv_transfer.model_features.Feature`.
HAND_OFF, PREFIX_CACHE, PREFIX_INDEX, TIERS = "hand-off", "prefix cache", "prefix index", "tiers"
SESSIONS, DECODE_BATCHES = "sessions", "decode batches"
_GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
_KV_BLOCKS = 200
# One or two blocks of any family, part of one, several, and more than a sliding window.
_LENGTHS = (1, 17, 33, 100, 129, 300, 500, 700)
# More than the device's blocks hold, and asked for again and again.
_LONG_PROMPTS, _LONG_TOKENS, _ROUNDS = 8, 900, 3
_CLAIM_S = 5.0


class TrialError(Exception):
    """What the service says of a model is not what it does with it."""


@dataclass(slots=True)
class Outcome:
    """features: `yes`, or the sentence with which a worker or its start refuses it. answers: compared with plain
    vLLM's, all equal."""

    features: dict[str, str] = field(default_factory=dict)
    answers: int = 0
    distinct_answers: int = 0


async def outcome_of(name: str, family: Family, folder: Path) -> Outcome:
    """Raises TrialError for a wrong token, and where what is missing and what works are not each other's rest."""
    write_model(family, folder / "model")
    loaded = load(
        flags={
            "model.name": name,
            "model.path": str(folder / "model"),
            "engine.device": "cpu",
            "engine.dtype": family.dtype,
            "engine.max_model_len": 1024,
            "engine.kv_blocks": _KV_BLOCKS,
            "tiers.host_gib": 0.02,
            "index.chunk_tokens": 64,
            "placement.disaggregation": "always",
            **family.settings,
        }
    )
    service = KeptCommand("serve", own_settings(loaded), folder)
    try:
        await service.start()
    except StartError as error:
        return Outcome(features={HAND_OFF: str(error).partition("StartError: ")[2].partition(" (at least")[0]})
    try:
        async with (
            plain_engine(loaded.config) as (address, _),
            AsyncClient(service.address) as client,
        ):
            return await _Trial(client, DirectWorker(address, GENERATION)).run(family.not_shown)
    finally:
        await service.stop()


class _Trial:
    def __init__(self, client: AsyncClient, plain: DirectWorker) -> None:
        self._client = client
        self._plain = plain
        self._rng = random.Random(0)
        self._outcome = Outcome()
        self._answers: set[tuple[int, ...]] = set()

    async def run(self, not_shown: Mapping[str, str]) -> Outcome:
        missing: dict[str, str] = {}
        for view in await self._client.workers():
            missing |= view.registration.model.missing_features
        tries: dict[str, Callable[[], Awaitable[bool]]] = {
            HAND_OFF: self._hand_off,
            PREFIX_CACHE: self._prefix_cache,
            PREFIX_INDEX: self._prefix_index,
            TIERS: self._tiers,
            SESSIONS: self._sessions,
            DECODE_BATCHES: self._decode_batches,
        }
        for feature, attempt in tries.items():
            if feature in not_shown:
                self._outcome.features[feature] = f"not shown: {not_shown[feature]}"
                continue
            works = await attempt()
            if works == (feature in missing):
                raise TrialError(f"{feature}: {'works' if works else 'does not work'}, and the workers say {missing}")
            self._outcome.features[feature] = missing.get(feature, YES)
        await self._plain.close()
        self._outcome.distinct_answers = len(self._answers)
        return self._outcome

    async def _same(self, prompt: Sequence[int]) -> Generated:
        """Through the service, and equal to plain vLLM's."""
        ours = await self._client.generate(token_prompt(prompt), **_GREEDY)
        await self._compare(prompt, ours.token_ids)
        return ours

    async def _compare(self, prompt: Sequence[int], token_ids: Sequence[int]) -> None:
        plain = await self._plain.decode(list(prompt), _GREEDY)
        if list(token_ids) != plain.token_ids:
            raise TrialError(f"{len(prompt)} prompt tokens give {token_ids}, plain vLLM gives {plain.token_ids}")
        self._outcome.answers += 1
        self._answers.add(tuple(token_ids))

    def _prompt(self, tokens: int) -> list[int]:
        return [self._rng.randrange(VOCABULARY - 2) for _ in range(tokens)]

    # The features.

    async def _hand_off(self) -> bool:
        answers = [await self._same(self._prompt(length)) for length in _LENGTHS]
        return all(answer.completion.route.handoff == generation.HANDOFF_OUTCOME_PULLED for answer in answers)

    async def _prefix_cache(self) -> bool:
        prompt = self._prompt(500)
        await self._same(prompt)
        again = await self._same(prompt)
        longer = await self._same([*prompt, *self._prompt(50)])
        return min(answer.completion.usage.cached_tokens for answer in (again, longer)) > 0

    async def _prefix_index(self) -> bool:
        prompt = self._prompt(500)
        await self._same(prompt)
        await asyncio.sleep(_CLAIM_S)
        request = admin.LookupPrefixRequest(prompt=token_prompt(prompt))
        found = await self._client.admin.LookupPrefix(request, timeout=10)
        return any(worker.device_tokens for worker in found.workers)

    async def _tiers(self) -> bool:
        prompts = [self._prompt(_LONG_TOKENS) for _ in range(_LONG_PROMPTS)]
        for _ in range(_ROUNDS):
            for prompt in prompts:
                await self._same(prompt)
        return any(view.tiers.host_hit_tokens for view in await self._client.workers())

    async def _sessions(self) -> bool:
        try:
            await self._appended()
            await self._updated()
        except NotSupportedError:
            return False
        return True

    async def _appended(self) -> None:
        prompt = self._prompt(400)
        async with self._client.session(prompt[:100], **_GREEDY) as session:
            for start in range(100, 400, 100):
                await session.append(prompt[start : start + 100])
            token_ids = [token for delta in [each async for each in session.finish()] for token in delta.token_ids]
        await self._compare(prompt, token_ids)

    async def _updated(self) -> None:
        prompt = self._prompt(500)
        head, contexts = prompt[:100], (prompt[100:300], prompt[100:200] + prompt[300:500], prompt[100:150])
        async with self._client.session(head, mode="update", **_GREEDY) as session:
            for context in contexts:
                await session.update(context)
            token_ids = [token for delta in [each async for each in session.finish()] for token in delta.token_ids]
        await self._compare(head + contexts[-1], token_ids)

    async def _decode_batches(self) -> bool:
        shared = self._prompt(300)
        prompts = [shared + self._prompt(20) for _ in range(6)]
        answers = await asyncio.gather(*(self._client.generate(token_prompt(each), **_GREEDY) for each in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            await self._compare(prompt, answer.token_ids)
        views = [view for view in await self._client.workers() if view.registration.pool == wire.POOL_DECODE]
        return all(view.decode.policy != "fcfs" for view in views)
