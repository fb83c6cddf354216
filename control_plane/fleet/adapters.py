"""The LoRA adapters of a service: requests name them as their model. One hash in Redis, which all routers follow.

    served     in Redis, and so in `known` of every router within `redis.refresh_s`
    loaded     at a worker: all of them, when an adapter comes to be served; one that starts later loads an adapter with
               the first request for it that is placed there (`worker_runtime.loaded_adapters`)
An adapter is what its files hold: another one cannot take its name while it is served, and the KV of the two is kept
apart by their digests. The field with the empty name is another one each time that the hash is begun: where it is not
the one that a router has seen, Redis has lost its data, and the router writes again what it knows.
"""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

from google.protobuf.message import DecodeError
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import worker_pb2 as wire

from cluster_configs.schema import ADAPTER_NAME, ADAPTER_NAME_RULE
from cluster_core.errors import (
    InvalidInputError,
    NotFoundError,
    NotSupportedError,
    OutOfRangeError,
    RachisError,
    UnavailableError,
)
from cluster_wire import registry
from cluster_wire.redis_client import REDIS_DOWN, RedisClient
from cluster_wire.redis_loop import LoopWords, RedisLoop
from control_plane.fleet.membership import Member, Membership
from control_plane.fleet.worker_client import WorkerClient, WorkerLacksAdapterError

logger = logging.getLogger(__name__)

_WORDS = LoopWords(
    logger,
    away="Redis does not answer, adapters stay as they are: %s",
    back="Redis answers again, adapters are as it says",
    defect="adapters cannot be followed",
)
_EPOCH = ""
_MOST_PATH_CHARACTERS = 4096
_Answer = TypeVar("_Answer")
# A worker gives a load up by itself before.
_LOAD_TIMEOUT_S = 150.0
_UNLOAD_TIMEOUT_S = 5.0


class NameTakenError(InvalidInputError):
    """Another adapter is served under that name."""


class Adapters:
    """`follow` until cancelled, then `close`. known: those that may be asked for, by name; changed in place."""

    def __init__(
        self,
        redis: RedisClient,
        service_id: str,
        membership: Membership,
        client: WorkerClient,
        *,
        refresh_s: float,
    ) -> None:
        self.known: dict[str, wire.Adapter] = {}
        self._redis = redis
        self._key = registry.adapters_key(service_id)
        self._membership = membership
        self._client = client
        # What the hash says that it is, see the module; and whether it has been read at all.
        self._epoch = b""
        self._has_read = False
        # Reading and changing `known` take turns.
        self._changing = asyncio.Lock()
        self._loop = RedisLoop(self.read, lambda: asyncio.sleep(refresh_s), _WORDS)

    async def follow(self) -> None:
        await self._loop.run()

    async def close(self) -> None:
        await self._redis.aclose()

    async def start(self) -> None:
        """Before anybody asks; where Redis does not answer, `follow` finds out."""
        with suppress(*REDIS_DOWN):
            await self.read()

    async def read(self) -> None:
        """Brings `known` up to date. Raises one of REDIS_DOWN."""
        async with self._changing:
            await self._read()

    async def _read(self) -> None:
        found = await self._hash()
        if self.known and found.get(_EPOCH) != self._epoch:
            # Redis has lost what this router knows, whoever has written there since.
            await self._write(dict(self.known))
            found = await self._hash()
        self._epoch = found.pop(_EPOCH, b"")
        for name in self.known.keys() - found.keys():
            del self.known[name]
        parsed = {name: _adapter(name, value) for name, value in found.items()}
        self.known.update({name: each for name, each in parsed.items() if each is not None})
        self._has_read = True

    async def _hash(self) -> dict[str, bytes]:
        return {_text(name): _bytes(value) for name, value in (await self._redis.hgetall(self._key)).items()}

    def views(self) -> admin.ListAdaptersResponse:
        """Raises UnavailableError before Redis has been read once."""
        if not self._has_read:
            raise UnavailableError("which adapters there are is not known yet", retry_after_ms=1000)
        views = [
            admin.AdapterView(
                adapter=adapter,
                worker_ids=[
                    member.worker_id
                    for member in self._membership.members()
                    if adapter.digest in member.registration.adapters
                ],
            )
            for _, adapter in sorted(self.known.items())
        ]
        with suppress(UnavailableError):
            model = self._membership.served_model()
            return admin.ListAdaptersResponse(adapters=views, max_adapters=model.max_adapters, model=model.name)
        return admin.ListAdaptersResponse(adapters=views)

    async def load(self, name: str, path: str) -> tuple[wire.Adapter, list[str]]:
        """Has all workers load it, and serves it. Returns it, and those that have it; changes nothing where one fails.

        Raises ClientFault, UnavailableError where Redis or a worker does not answer.
        """
        self._check(name, path)
        await self._redis_says(self.read())
        self._check_room(name)
        members = self._reachable()
        loaded = await asyncio.gather(
            *(self._load_at(member, wire.Adapter(name=name, path=path)) for member in members), return_exceptions=True
        )
        try:
            adapter = wire.Adapter(name=name, path=path, digest=_digest_of_all(members, loaded))
            await self._redis_says(self._serve(adapter))
        except RachisError:
            await self._take_back({each for each in loaded if isinstance(each, str)})
            raise
        return adapter, [str(member.worker_id) for member in members]

    async def load_instead(self, name: str, path: str) -> None:
        """As `load`; another adapter that is served under the name is unloaded first."""
        try:
            await self.load(name, path)
        except NameTakenError:
            await self.unload(name)
            await self.load(name, path)

    async def unload(self, name: str) -> list[str]:
        """Nobody may ask for it any more. Returns workers that still have it.

        Raises NotFoundError, UnavailableError.
        """
        adapter = await self._redis_says(self._taken_out(name))
        return await self._take_back({adapter.digest})

    async def _taken_out(self, name: str) -> wire.Adapter:
        async with self._changing:
            await self._read()
            if name not in self.known:
                known = ", ".join(sorted(self.known)) or "none"
                raise NotFoundError(f"no adapter `{name}`; there are: {known}", field="name")
            await self._redis.hdel(self._key, name)
            return self.known.pop(name)

    def _check(self, name: str, path: str) -> None:
        model = self._membership.served_model()
        if not model.max_adapters:
            raise NotSupportedError(
                "the service takes no adapters: set lora.max_loaded and start it again", field="name"
            )
        if not ADAPTER_NAME.fullmatch(name):
            raise InvalidInputError(ADAPTER_NAME_RULE, field="name")
        if name == model.name:
            raise InvalidInputError(f"`{name}` is the model itself", field="name")
        if not path or len(path) > _MOST_PATH_CHARACTERS or not path.isprintable():
            raise InvalidInputError(f"must be 1 to {_MOST_PATH_CHARACTERS} printable characters", field="path")

    def _check_room(self, name: str) -> None:
        most = self._membership.served_model().max_adapters
        if name not in self.known and len(self.known) >= most:
            raise OutOfRangeError(
                f"there are {len(self.known)} adapters already, lora.max_loaded is {most}", field="name"
            )

    def _reachable(self) -> list[Member]:
        """All workers that serve, those that drain among them: they may come back."""
        members = [member for member in self._membership.members() if member.registration.address]
        if not members:
            raise UnavailableError("no worker has registered yet", retry_after_ms=1000)
        return members

    async def _load_at(self, member: Member, adapter: wire.Adapter) -> str:
        return await self._client.load_adapter(member.registration.address, adapter, _LOAD_TIMEOUT_S)

    async def _serve(self, adapter: wire.Adapter) -> None:
        """As it stands in Redis by then: another router may have been quicker."""
        async with self._changing:
            await self._read()
            self._check_room(adapter.name)
            known = self.known.get(adapter.name)
            if known is not None and known.digest != adapter.digest:
                raise NameTakenError(
                    f"`{adapter.name}` is another adapter already, from {known.path}: unload that first", field="name"
                )
            if known is not None:
                # The same files, perhaps from another folder.
                await self._redis.hset(self._key, adapter.name, adapter.SerializeToString())
            else:
                await self._write({adapter.name: adapter})
            await self._read()

    async def _write(self, adapters: Mapping[str, wire.Adapter]) -> None:
        """Those that are not there. Their names come first: a hash without them would be believed."""
        for name, adapter in adapters.items():
            await self._redis.hsetnx(self._key, name, adapter.SerializeToString())
        await self._redis.hsetnx(self._key, _EPOCH, secrets.token_hex(8))

    async def _redis_says(self, call: Awaitable[_Answer]) -> _Answer:
        try:
            return await call
        except REDIS_DOWN as error:
            raise UnavailableError(
                f"Redis does not answer, adapters stay as they are ({error})", retry_after_ms=1000
            ) from None

    async def _take_back(self, digests: set[str]) -> list[str]:
        """Of all workers, what is served under no name; returns those that still have any of it."""
        unwanted = digests - {adapter.digest for adapter in self.known.values()}
        members = [member for member in self._membership.members() if member.registration.address]
        calls = [(member, digest) for member in members for digest in unwanted]
        still_there = await asyncio.gather(*(self._unload_at(*call) for call in calls))
        return sorted(
            {str(member.worker_id) for (member, _), is_there in zip(calls, still_there, strict=True) if is_there}
        )

    async def _unload_at(self, member: Member, digest: str) -> bool:
        """Whether the worker still has it."""
        try:
            return await self._client.unload_adapter(member.registration.address, digest, _UNLOAD_TIMEOUT_S)
        except RachisError as error:
            logger.warning("%s was not asked to give an adapter back: %s", member.worker_id, error)
            return True


def _digest_of_all(members: Sequence[Member], loaded: Sequence[str | BaseException]) -> str:
    """Raises what a worker has refused, InvalidInputError where they have different adapters at that path."""
    workers: dict[str, list[str]] = {}
    for member, each in zip(members, loaded, strict=True):
        if isinstance(each, BaseException):
            raise _refusal(member, each)
        workers.setdefault(each, []).append(member.worker_id)
    if len(workers) > 1:
        differ = "; ".join(f"{', '.join(ids)} have {digest[:8]}" for digest, ids in workers.items())
        raise InvalidInputError(f"the hosts have different adapters there: {differ}", field="path")
    return next(iter(workers))


def _refusal(member: Member, error: BaseException) -> BaseException:
    if isinstance(error, WorkerLacksAdapterError):
        return InvalidInputError(f"{member.worker_id}: {error}", field="path")
    if isinstance(error, RachisError):
        return UnavailableError(f"{member.worker_id} did not load it: {error}", retry_after_ms=1000)
    return error


def _adapter(name: str, record: bytes) -> wire.Adapter | None:
    """None for a record that cannot be read: the others still count."""
    try:
        return wire.Adapter.FromString(record)
    except DecodeError:
        logger.error("the record of adapter %s is damaged and left out", name)
        return None


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _bytes(value: bytes | str) -> bytes:
    return value if isinstance(value, bytes) else value.encode()
