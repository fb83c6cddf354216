"""What it costs that calls between routers and workers are encrypted: two services in turns, one of which has a secret.

    plain        no secret: what routers and workers say is plain text
    again        the same once more, another router over the same worker: what of a difference is the machine's
    encrypted    a secret, and all that comes with it: TLS, the key of each call, the salt of a prompt

Each service has a worker that computes nothing and gives every answer a token at each step, so that what is left is
software. Figures are ratios to `plain` (`router_turns`).
"""

import asyncio
import random
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from rachis import AsyncClient, token_prompt

from benchmarks import child_module
from benchmarks.kept_command import KeptCommand
from benchmarks.paced_worker import PacedWorker
from benchmarks.router_turns import Arm, compared, in_turn, medians
from builtin_model import WEIGHTS
from cluster_core.clock import monotonic_s
from cluster_wire.secret import write_secret
from control_plane.service.embedded_redis import EmbeddedRedis

# Of each router, before anything counts.
WARM_UP = 40
# By router: the service that it is of.
_SERVICES = {"plain": "plain", "again": "plain", "encrypted": "encrypted"}

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Wish:
    """requests: of each turn. steps_per_s: of the workers' engines."""

    rounds: int = 20
    requests: int = 200
    concurrency: int = 8
    steps_per_s: float = 100.0
    prompt_tokens: int = 600
    new_tokens: int = 16


class EncryptionBenchmark:
    """folder: for what its processes need, and their logs."""

    def __init__(self, folder: Path, wish: Wish, say: Say, seed: int = 0) -> None:
        self._folder = folder
        self._wish = wish
        self._say = say
        self._rng = random.Random(seed)
        self._secret_file = folder / "secret"

    async def run(self) -> dict[str, Any]:
        wish = self._wish
        write_secret(self._secret_file)
        async with AsyncExitStack() as ends:
            arms = await self._arms(ends)
            for number in range(wish.rounds):
                for arm in in_turn(arms, number):
                    names = [f"{arm.name}-{number}-{each}" for each in range(wish.requests)]
                    turn, _ = await arm.turn(names, wish.concurrency, lambda name, arm=arm: self._ask(arm, name))  # type: ignore[misc]  # mypy takes no default for a parameter
                    arm.turns.append(turn)
                self._say(f"round {number + 1} of {wish.rounds}")
        plain, *others = arms
        return {
            **asdict(wish),
            "plain": medians(plain.turns),
            **{arm.name: compared(plain.turns, arm.turns) for arm in others},
        }

    async def _arms(self, ends: AsyncExitStack) -> list[Arm]:
        redis = EmbeddedRedis(self._folder)
        await redis.start()
        ends.push_async_callback(redis.stop)
        workers = {
            service: await ends.enter_async_context(self._worker(redis.url, service))
            for service in dict.fromkeys(_SERVICES.values())
        }
        return [
            await ends.enter_async_context(self._arm(name, redis.url, service, workers[service]))
            for name, service in _SERVICES.items()
        ]

    @asynccontextmanager
    async def _worker(self, redis_url: str, service: str) -> AsyncIterator[psutil.Process]:
        folder, weights = self._folder / f"worker-{service}", str(WEIGHTS)
        folder.mkdir()
        streams, steps = self._wish.concurrency, self._wish.steps_per_s
        worker = PacedWorker(redis_url, service, weights, weights, streams, steps, self._secret_of(service))
        async with child_module.running("benchmarks.paced_worker", asdict(worker), folder) as process:
            await child_module.said(process)
            yield psutil.Process(process.pid)

    @asynccontextmanager
    async def _arm(self, name: str, redis_url: str, service: str, worker: psutil.Process) -> AsyncIterator[Arm]:
        """Warm: its first requests are over."""
        folder = self._folder / name
        folder.mkdir()
        settings = {"model.path": str(WEIGHTS), "service.name": service, "redis.url": redis_url}
        router = KeptCommand("route", {**settings, "security.secret_file": self._secret_of(service)}, folder)
        await router.start()
        try:
            async with AsyncClient(router.address) as client:
                arm = Arm(name, router, client, worker)
                await asyncio.gather(*(self._ask(arm, f"warm-{each}") for each in range(WARM_UP)))
                yield arm
        finally:
            await router.stop()

    def _secret_of(self, service: str) -> str | None:
        return str(self._secret_file) if service == "encrypted" else None

    async def _ask(self, arm: Arm, name: str) -> tuple[float, float]:
        """TTFT and the whole time, in milliseconds."""
        wish = self._wish
        prompt = token_prompt([self._rng.randrange(256) for _ in range(wish.prompt_tokens)])
        began_s, first_s = monotonic_s(), 0.0
        async for _ in arm.client.stream(prompt, request_id=name, max_tokens=wish.new_tokens, ignore_eos=True):
            first_s = first_s or monotonic_s()
        return (first_s - began_s) * 1000, (monotonic_s() - began_s) * 1000


async def measure(wish: Wish, say: Say) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="rachis-encryption-") as folder:
        return await EncryptionBenchmark(Path(folder), wish, say).run()
