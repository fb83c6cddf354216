"""The clients, asyncio's and the one that waits, against the real router over fake engines."""

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from rachis import AsyncClient, Client, ClosedError, InvalidInputError, OverloadedError, RefusedError, UnavailableError

from tests.fakes.answers import session_text, whole_text
from tests.fakes.cluster import DECODE, PREFILL, Cluster, running_cluster

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8}


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(cluster.router.address) as client:
        yield client


@pytest.mark.parametrize("prompt", ["hello", [*b"hello"], [{"role": "user", "content": "hello"}]])
async def test_a_prompt_is_text_tokens_or_messages(cluster: Cluster, client: AsyncClient, prompt: Any) -> None:
    cluster.calls += 1
    assert (await client.generate(prompt, **GREEDY)).text == whole_text(8)


async def test_bad_input_names_its_field_on_either_side(cluster: Cluster, client: AsyncClient) -> None:
    cluster.calls += 1
    with pytest.raises(InvalidInputError, match="top_p") as refused:
        await client.generate("hello", top_p=7.0)
    assert refused.value.field == "sampling.top_p"
    for wrong in ({"top_q": 1}, {"max_tokens": -1}, {"stop": 7}, {"seed": "x"}):
        with pytest.raises(InvalidInputError) as refused:
            await client.generate("hello", **wrong)
        assert refused.value.field == f"sampling.{next(iter(wrong))}"
    for address in ("1.2.3.4:5,router:7", "1.2.3.4:5,[::1]:7"):
        with pytest.raises(InvalidInputError, match="address"):
            AsyncClient(address)
    wrong_calls: list[tuple[str, Callable[[], Any]]] = [
        ("max_retries", lambda: AsyncClient("127.0.0.1:1", max_retries=-1)),
        ("n", lambda: client.generate_choices("hello", cast(int, "2"))),
        ("n", lambda: client.generate("hello", n=3)),
        ("n", lambda: anext(client.stream("hello", n=3))),
        ("mode", lambda: client.session("hello", mode=cast(Any, "apend"))),
    ]
    for field, call in wrong_calls:
        with pytest.raises(InvalidInputError) as refused:
            await call()
        assert refused.value.field == field


@pytest.fixture
async def full() -> AsyncIterator[Cluster]:
    """Without workers, and nobody may wait for any."""
    async with running_cluster(router__max_queued_requests=0, router__queue_timeout_s=0.1) as cluster:
        yield cluster


async def test_a_refusal_is_repeated_as_often_as_was_said(full: Cluster) -> None:
    full.calls += 3
    async with AsyncClient(full.router.address, max_retries=2) as patient:
        with pytest.raises((OverloadedError, UnavailableError)) as refused:
            await patient.generate("hello", **GREEDY)
    assert refused.value.retry_after_ms is not None
    assert patient.retries == 2


async def test_a_refusal_is_not_repeated_beyond_the_deadline(full: Cluster) -> None:
    full.calls += 1
    async with AsyncClient(full.router.address, max_retries=2) as patient:
        with pytest.raises((OverloadedError, UnavailableError)):
            await patient.generate("hello", timeout_s=0.9, **GREEDY)
    assert patient.retries == 0


async def test_a_client_speaks_tls_where_it_is_given_credentials(cluster: Cluster, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    await asyncio.to_thread(subprocess.run, [*made, *names], check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    context.set_alpn_protocols(["h2"])

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind = await asyncio.open_connection(*cluster.router.address.rsplit(":", 1))
        await asyncio.gather(_copy(reader, behind[1]), _copy(behind[0], writer), return_exceptions=True)

    proxy = await asyncio.start_server(forward, "127.0.0.1", 0, ssl=context)
    address = f"127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
    trusted = grpc.ssl_channel_credentials(certificate.read_bytes())
    try:
        cluster.calls += 1
        async with AsyncClient(address, credentials=trusted) as client:
            assert (await client.generate("hello", **GREEDY)).text == whole_text(8)
        for credentials in (None, grpc.ssl_channel_credentials()):
            async with AsyncClient(address, credentials=credentials) as stranger:
                with pytest.raises(UnavailableError):
                    await stranger.generate("hello", timeout_s=5.0, **GREEDY)
    finally:
        proxy.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(1 << 16):
        writer.write(piece)
        await writer.drain()


async def test_the_client_that_waits_does_the_same(cluster: Cluster) -> None:
    cluster.calls += 5

    def use() -> None:
        with Client(cluster.router.address) as client:
            assert client.is_serving(5.0)
            assert client.generate("hello", **GREEDY).text == whole_text(8)
            assert "".join(piece.text for piece in client.stream("hello", **GREEDY) if hasattr(piece, "text")) == (
                whole_text(8)
            )
            assert [each.text for each in client.generate_choices("hello", 2, **GREEDY)] == [whole_text(8)] * 2
            with client.session("hello", **GREEDY) as session:
                session.append(" wide")
                assert session.append_all(iter([" ", "world"])) == 2
                text = "".join(delta.text for delta in session.finish("!"))
            assert text == session_text("hello wide world!")
            assert (session.completion.usage.prompt_tokens, session.refusals) == (17, [])
            assert session.request_id
            with pytest.raises(InvalidInputError, match="top_p"):
                client.generate("hello", top_p=7.0)
        client.close()
        with pytest.raises(RuntimeError, match="closed"):
            client.generate("hello")

    await asyncio.to_thread(use)


async def test_a_session_that_waits_hears_of_what_is_refused(cluster: Cluster) -> None:
    cluster.calls += 1

    def use() -> None:
        with Client(cluster.router.address) as client, client.session("hello", **GREEDY) as session:
            session.update("other")
            with pytest.raises(RefusedError, match="takes no update"):
                list(session.finish())
            rest = session.deltas() if session.answering else session.finish()
            assert "".join(delta.text for delta in rest) == session_text("hello")

    await asyncio.to_thread(use)


async def test_an_answer_left_early_is_cancelled_and_the_client_goes_on() -> None:
    async with running_cluster(handoff__deadline_s=1.0) as cluster:
        for pool in (PREFILL, DECODE):
            await cluster.add(pool)
        cluster.calls += 3

        def use() -> None:
            with Client(cluster.router.address) as client:
                pieces = client.stream("hello", **GREEDY)
                next(pieces)
                pieces.close()
                assert client.generate("hello", **GREEDY).text == whole_text(8)
                left = client.stream("hello", **GREEDY)
                next(left)
                # Closed with an answer that nobody reads any more.

        await asyncio.to_thread(use)


async def test_whatever_a_closed_client_is_asked_for_says_so() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        other = client.with_metadata([("traceparent", "x")])
    asked: list[Any] = [
        client.generate("x"),
        other.generate("x"),
        client.session("x").__aenter__(),
        client.is_serving(1.0),
        client.workers(),
    ]
    for each in asked:
        with pytest.raises(ClosedError, match="the client is closed"):
            await each


async def test_several_threads_use_one_client(cluster: Cluster) -> None:
    cluster.calls += 12

    def use(client: Client) -> list[str]:
        return [client.generate("hello", **GREEDY).text for _ in range(3)]

    with await asyncio.to_thread(Client, cluster.router.address) as client:
        found = await asyncio.gather(*(asyncio.to_thread(use, client) for _ in range(4)))
        await asyncio.to_thread(client.close)
    assert found == [[whole_text(8)] * 3] * 4
