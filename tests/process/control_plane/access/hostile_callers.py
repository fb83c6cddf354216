"""Strangers at the doors of one router: keys, certificates and bytes, drawn from a seed, between calls that are served.

Each move says what has to come of it; what is no answer within a generous bound is a hang. What nobody may read
afterwards is looked for by who plays: in logs, in the audit log, and in all that passed on the way to workers.
"""

import asyncio
import random
import string
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from rachis import AsyncClient
from rachis.errors import RachisError
from rachis.metadata_channel import Metadata

from benchmarks.certificates import Authority
from cluster_wire.members import caller_metadata, member_metadata
from cluster_wire.secret import Secret, read_secret
from control_plane.access.api_keys import ApiKey, parsed
from control_plane.access.key_file import edit
from tests.process.control_plane.access.certified_world import Certified, answered, told

# What is no answer by then hangs, on a busy machine too.
BOUND_S = 300.0
PROMPT = "nobody but its tenant reads this prompt"
# What a client may be told that is not served: no other status, and no connection.
_REFUSED = ("UNAUTHENTICATED", "RESOURCE_EXHAUSTED")
_GOOD = ("generate", "observe", "all")
_TLS_HELLO = bytes.fromhex("16030100c8010000c40303")


@dataclass(slots=True)
class Told:
    """What one move has come to. expected: names of who one may be, or beginnings of statuses."""

    move: str
    found: str
    expected: tuple[str, ...]

    @property
    def is_right(self) -> bool:
        return self.found.startswith(self.expected)


class HostileCallers:
    """`play`, once. folder: for a stranger's authority."""

    def __init__(self, world: Certified, folder: Path, seed: int) -> None:
        self._world = world
        self._rng = random.Random(seed)
        self._secret = read_secret(world.keyed.keys_file.parent / "secret")
        self._stranger = Authority(folder / "stranger", f"stranger-{seed}")
        self._numbers = iter(range(1 << 30))
        # Keys that were good and are not any more.
        self._revoked: set[str] = set()

    async def play(self, moves: int, sought: str = "") -> list[Told]:
        """What was wrong. sought: the move that is to be; once it was, no other is made."""
        kinds: list[Callable[[], Awaitable[Told]]] = [
            self.a_good_key, self.a_good_certificate, self.a_generation, self.a_wrong_key, self.a_strange_certificate,
            self.a_forged_certificate, self.a_stolen_service_key, self.plain_bytes, self.plain_grpc, self.half_a_hello,
        ]  # fmt: skip
        # A router that knows a key does not look at it again, however often others have tried it wrongly.
        assert [await self._who(self._world.keyed.key[who]) for who in _GOOD] == list(_GOOD)
        wrong: list[Told] = []
        for number in range(moves):
            if number == moves // 2:
                await self._revoke_one()
            together = [self._bounded(self._rng.choice(kinds)) for _ in range(self._rng.choice((1, 1, 2, 4)))]
            wrong += [each for each in await asyncio.gather(*together) if not each.is_right]
            if sought in {each.move for each in wrong}:
                break
        return wrong

    async def _bounded(self, move: Callable[[], Awaitable[Told]]) -> Told:
        try:
            async with asyncio.timeout(2 * BOUND_S):
                return await move()
        except TimeoutError:
            return Told(move.__name__, "it hangs", ("an answer",))

    # Who is served.

    async def a_good_key(self) -> Told:
        who = self._rng.choice([name for name in _GOOD if name not in self._revoked])
        return Told("a good key", await self._who(self._world.keyed.key[who]), (who,))

    async def a_good_certificate(self) -> Told:
        who = self._rng.choice(("generate", "observe", "operate"))
        async with self._world.client(self._name(), f"spiffe://acme/{who}") as client:
            return Told("a good certificate", await answered(client, BOUND_S), (f"by-{who}",))

    async def a_generation(self) -> Told:
        async with self._world.client(self._name(), "spiffe://acme/generate") as client:
            # It is connected from here on: each call has an outcome.
            await answered(client, BOUND_S)
            self._world.keyed.cluster.calls += 1
            try:
                answer = await client.generate(PROMPT, max_tokens=4, temperature=0.0)
                found = "served" if answer.token_ids else "nothing"
            except RachisError as refused:
                found = f"refused: {refused}"
            # On a busy machine workers may be out of reach for a while: each try has an outcome of its own.
            self._world.keyed.cluster.calls += client.retries
        return Told("a generation", found, ("served",))

    # Who is not.

    async def a_wrong_key(self) -> Told:
        key = self._world.keyed.key[self._rng.choice(("generate", "operate"))]
        given = self._rng.choice(
            [
                "", "rk", key[:-1], key + "A", key.swapcase(), key.replace("rk-", "rs-"), self._another_secret(key),
                self._secret.service_key[:-1] + "!", Secret(bytes(32)).service_key, "a.b.c", f"{key}, {key}",
                "x" * self._rng.randrange(1, 4000), *(self._world.keyed.key[who] for who in self._revoked),
            ]
        )  # fmt: skip
        return Told("a wrong key", await self._who(given), _REFUSED)

    async def a_strange_certificate(self) -> Told:
        name = self._name()
        chain, key = self._rng.choice(
            [
                self._stranger.sign(name, "spiffe://acme/operate"),
                self._world.authority.sign(name, "spiffe://acme/operate", days=-1.0),
                self._world.authority.sign(name, f"spiffe://acme/{name}"),
            ]
        )
        trusted = self._world.authority.ca.read_bytes()
        credentials = grpc.ssl_channel_credentials(trusted, key.read_bytes(), chain.read_bytes())
        async with AsyncClient(self._world.address, credentials=credentials, api_key="") as client:
            return Told("a strange certificate", await told(client, BOUND_S), ("UNAUTHENTICATED", "UNAVAILABLE"))

    async def a_forged_certificate(self) -> Told:
        """Handed on by who has no secret: whoever says so stays who they are."""
        guess = Secret(self._rng.randbytes(32))
        metadata = list(caller_metadata(guess, self._operators()))
        self._rng.shuffle(metadata)
        kept = metadata[: self._rng.randrange(len(metadata) + 1)]
        has_key = any(name == "authorization" for name, _ in kept)
        async with self._world.client(self._name(), "spiffe://acme/generate") as client:
            found = await answered(client.calling_with(kept), BOUND_S)
        return Told("a forged certificate", found, _REFUSED if has_key else ("by-generate",))

    async def a_stolen_service_key(self) -> Told:
        """As a worker has it, which has not the certificate of the service."""
        metadata: Metadata = self._rng.choice(
            [caller_metadata(self._secret, self._operators()), caller_metadata(self._secret, self._rng.randbytes(400))]
        )
        async with self._world.client(self._name(), "spiffe://acme/generate") as client:
            return Told("a stolen key", await answered(client.calling_with(metadata), BOUND_S), _REFUSED)

    # Who speaks another language.

    async def plain_bytes(self) -> Told:
        sent = self._rng.choice(
            [
                b"GET / HTTP/1.1\r\nhost: a\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", self._rng.randbytes(900),
                _TLS_HELLO + self._rng.randbytes(300), b"\x15\x03\x01\x00\x02\x02\x28",
            ]
        )  # fmt: skip
        reader, writer = await self._connected()
        with suppress(OSError):
            writer.write(sent)
            writer.write_eof()
            while answer := await reader.read(1 << 16):
                if self._leaks(answer):
                    return Told("plain bytes", "they leak", ("an end",))
        writer.close()
        return Told("plain bytes", "an end", ("an end",))

    async def plain_grpc(self) -> Told:
        async with AsyncClient(self._world.address, api_key=self._world.keyed.key["all"]) as client:
            metadata = (*member_metadata(self._secret), *caller_metadata(self._secret, self._operators()))
            asked = client if self._rng.random() < 0.5 else client.calling_with(metadata)
            return Told("plain gRPC", await told(asked, BOUND_S), ("UNAVAILABLE",))

    async def half_a_hello(self) -> Told:
        """It says no more, and is left behind: nobody waits for it."""
        _, writer = await self._connected()
        writer.write(_TLS_HELLO[: self._rng.randrange(1, len(_TLS_HELLO))])
        found = await self._who(self._world.keyed.key["all"])
        writer.transport.abort()
        return Told("half a hello", found, ("all",))

    # What they have.

    async def _who(self, key: str) -> str:
        async with self._world.client(self._name()) as client:
            return await answered(client.calling_with((("authorization", f"Bearer {key}"),)), BOUND_S)

    def _another_secret(self, key: str) -> str:
        """Of the same id."""
        return key[:21] + "".join(self._rng.choice(string.ascii_letters) for _ in key[21:])

    def _operators(self) -> bytes:
        """A certificate that anybody may have seen, DER."""
        chain, _ = self._world.authority.sign(self._name(), "spiffe://acme/operate")
        return x509.load_pem_x509_certificate(chain.read_bytes()).public_bytes(Encoding.DER)

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        doors = (self._world.address, self._world.keyed.cluster.router.address)
        host, _, port = self._rng.choice(doors).rpartition(":")
        return await asyncio.open_connection(host, int(port))

    def _leaks(self, said: bytes) -> bool:
        return any(each.encode() in said for each in self.kept)

    @property
    def kept(self) -> list[str]:
        """What nobody may read."""
        halves = [parsed(key) for key in self._world.keyed.key.values() if key]
        return [PROMPT, self._secret.service_key, *(half[1] for half in halves if half is not None)]

    async def _revoke_one(self) -> None:
        """One key has another secret, with no grace for the one before; calls go on until routers know."""
        name = self._rng.choice(("generate", "observe"))
        given = self._world.keyed.key[name]

        def forget(keys: dict[str, ApiKey]) -> None:
            (key,) = (each for each in keys.values() if each.name == name)
            keys[key.key_id] = replace(key, secrets=())

        edit(self._world.keyed.keys_file, forget)
        for _ in range(100):
            if (await self._who(given)).startswith("UNAUTHENTICATED"):
                break
            await asyncio.sleep(0.1)
        self._revoked.add(name)

    def _name(self) -> str:
        """Certificates lie in files of their names."""
        return f"caller-{next(self._numbers)}"
