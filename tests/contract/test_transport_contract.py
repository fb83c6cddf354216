"""What the project relies on of gRPC, asked of real gRPC on loopback and of the simulation's transport alike."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc
import pytest
from rachis.conventions import next_message
from rachis.v1 import worker_pb2 as wire

from cluster_wire import calls
from tests.contract.transport_service import WAIT_S, Service, delta, error_of, happens, local, real


@pytest.fixture(params=[real, local], ids=["gRPC", "local"])
async def service(request: pytest.FixtureRequest) -> AsyncIterator[Service]:
    make: Callable[[], AbstractAsyncContextManager[Service]] = request.param
    async with asyncio.timeout(2 * WAIT_S), make() as made:
        yield made


async def test_a_unary_call_carries_a_message_each_way(service: Service) -> None:
    async def answer(request: Any, context: Any) -> Any:
        return wire.ReleaseHandoffResponse(released=request.lease_id == "mine")

    service.servicer.on_unary = answer

    assert (await service.release("mine")).released
    assert not (await service.release("other")).released


async def test_an_abort_carries_status_details_and_trailing_metadata(service: Service) -> None:
    async def answer(request: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", (("retry-after-ms", "5"), ("x-bin", b"\0\1")))

    service.servicer.on_unary = answer

    error = await error_of(service.release())

    assert (error.code(), error.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
    trailing: dict[Any, Any] = dict(error.trailing_metadata())  # type: ignore[arg-type]
    assert (trailing["retry-after-ms"], trailing["x-bin"]) == ("5", b"\0\1")


async def test_what_a_handler_raises_is_unknown_to_the_client(service: Service) -> None:
    async def answer(request: Any, context: Any) -> None:
        raise ValueError("a defect")

    service.servicer.on_unary = answer

    error = await error_of(service.release())

    assert error.code() is grpc.StatusCode.UNKNOWN
    assert "a defect" in (error.details() or "")


async def test_a_method_that_nobody_serves_is_unimplemented(service: Service) -> None:
    call = service.channel.unary_unary(
        "/rachis.v1.WorkerService/Nothing",
        request_serializer=wire.ReleaseHandoffRequest.SerializeToString,
        response_deserializer=wire.ReleaseHandoffResponse.FromString,
    )

    assert (await error_of(call(wire.ReleaseHandoffRequest()))).code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_stream_comes_in_order_and_ends(service: Service) -> None:
    async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
        for number in range(100):
            yield delta(str(number))

    service.servicer.on_stream = stream

    texts = [message.delta.text async for message in service.decode()]

    assert texts == [str(number) for number in range(100)]


async def test_what_was_streamed_before_an_abort_is_read_before_its_status(service: Service) -> None:
    async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
        for number in range(3):
            yield delta(str(number))
        await context.abort(grpc.StatusCode.ABORTED, "enough")

    service.servicer.on_stream = stream
    call = service.decode()
    await happens(service.servicer.begun)
    await asyncio.sleep(0.1)

    assert [(await call.read()).delta.text for _ in range(3)] == ["0", "1", "2"]
    assert (await error_of(call.read())).code() is grpc.StatusCode.ABORTED


async def test_a_deadline_ends_the_call_at_both_ends(service: Service) -> None:
    # On a busy machine it may pass before the call has got to the server.
    for timeout_s in (0.1, 1.0, 5.0, 20.0):
        error = await error_of(service.release(timeout=timeout_s))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        if service.servicer.begun.is_set():
            break
    await happens(service.servicer.cancelled)
    async with asyncio.timeout(WAIT_S):
        # The client may have cancelled a moment before the server's own clock says so.
        while service.servicer.context.time_remaining():  # noqa: ASYNC110 - a clock's reading
            await asyncio.sleep(0.001)


async def test_a_call_without_a_deadline_has_no_time_remaining(service: Service) -> None:
    remaining: list[float | None] = []

    async def answer(request: Any, context: Any) -> Any:
        remaining.append(context.time_remaining())
        return wire.ReleaseHandoffResponse()

    service.servicer.on_unary = answer

    await service.release()
    await service.release(timeout=50)

    assert remaining[0] is None
    assert remaining[1] is not None and 40 < remaining[1] < 51


@pytest.mark.parametrize("kind", ["unary", "stream", "session"])
async def test_a_cancel_reaches_the_server(service: Service, kind: str) -> None:
    async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
        yield delta("first")
        await asyncio.Event().wait()

    service.servicer.on_stream = stream
    call = {"unary": service.release, "stream": service.decode, "session": service.stub.PrefillSession}[kind]()
    if kind == "session":
        await call.write(wire.PrefillSessionRequest())
    await happens(service.servicer.begun)

    assert call.cancel()

    assert call.cancelled()
    await happens(service.servicer.cancelled)
    assert not call.cancel()


async def test_a_task_that_is_cancelled_while_it_reads_cancels_the_call(service: Service) -> None:
    call = service.stub.PrefillSession()
    reading = asyncio.create_task(call.read())
    await happens(service.servicer.begun)

    reading.cancel()

    with pytest.raises(asyncio.CancelledError):
        await reading
    assert call.cancelled()
    await happens(service.servicer.cancelled)


async def test_reading_a_call_that_was_cancelled_here_raises_cancelled(service: Service) -> None:
    call = service.stub.PrefillSession()
    await call.write(wire.PrefillSessionRequest())
    await happens(service.servicer.begun)
    call.cancel()

    with pytest.raises(asyncio.CancelledError):
        await call.read()


async def test_a_session_is_read_and_written_at_both_ends(service: Service) -> None:
    async def echo(context: Any) -> None:
        while (request := await next_message(context)) is not None:
            response = wire.PrefillSessionResponse()
            response.progress.inputs = len(request.append.token_ids)
            await context.write(response)

    service.servicer.on_session = echo
    call = service.stub.PrefillSession()
    for count in (3, 1):
        await call.write(wire.PrefillSessionRequest(append=wire.PrefillSessionAppend(token_ids=[0] * count)))
        assert (await next_message(call)).progress.inputs == count

    await call.done_writing()

    assert await next_message(call) is None
    assert await call.code() is grpc.StatusCode.OK


async def test_a_write_after_the_end_of_the_call_is_an_invalid_state(service: Service) -> None:
    async def leave(context: Any) -> None:
        await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    service.servicer.on_session = leave
    call = service.stub.PrefillSession()
    assert (await error_of(call.read())).code() is grpc.StatusCode.UNAVAILABLE

    with pytest.raises(asyncio.InvalidStateError):
        await call.write(wire.PrefillSessionRequest())


async def test_a_server_that_writes_to_nobody_hears_an_internal_error_or_is_cancelled(service: Service) -> None:
    writing, failed = asyncio.Event(), asyncio.Event()

    async def persist(context: Any) -> None:
        await next_message(context)
        try:
            while True:
                await context.write(wire.PrefillSessionResponse())
                writing.set()
                await asyncio.sleep(0.005)
        except (grpc.aio.InternalError, asyncio.CancelledError):
            failed.set()
            raise

    service.servicer.on_session = persist
    call = service.stub.PrefillSession()
    await call.write(wire.PrefillSessionRequest())
    await happens(writing)
    call.cancel()

    await happens(failed)


async def test_who_is_not_read_has_to_wait(service: Service) -> None:
    written = 0

    async def pour(context: Any) -> None:
        nonlocal written
        await next_message(context)
        while True:
            response = wire.PrefillSessionResponse()
            response.prefilled.first.text = "x" * 10_000
            await context.write(response)
            written += 1

    service.servicer.on_session = pour
    call = service.stub.PrefillSession()
    await call.write(wire.PrefillSessionRequest())
    before = -1
    async with asyncio.timeout(WAIT_S):
        while not written or written != before:
            before = written
            await asyncio.sleep(0.1)

    # More than any window holds.
    for _ in range(2 * before):
        await call.read()
    assert written > before
    call.cancel()


async def _gives_up_its_first_message(context: Any) -> None:
    writing = asyncio.create_task(context.write(wire.PrefillSessionResponse()))
    await asyncio.sleep(0)
    writing.cancel()
    await asyncio.wait({writing})
    await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")


async def test_a_call_that_has_begun_ends_though_its_first_message_was_given_up(service: Service) -> None:
    async def give_up(context: Any) -> None:
        await next_message(context)
        await calls.begin(context)
        await _gives_up_its_first_message(context)

    service.servicer.on_session = give_up
    call = service.stub.PrefillSession()
    await call.write(wire.PrefillSessionRequest())

    # What was given up may have gone out.
    with pytest.raises(grpc.aio.AioRpcError, match="gone"):
        while await next_message(call) is not None:
            pass


async def test_grpc_cannot_end_a_call_that_has_not_begun_once_its_first_message_was_given_up() -> None:
    """Where this fails, `calls.begin` may go."""
    failed: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()

    async def give_up(context: Any) -> None:
        try:
            await _gives_up_its_first_message(context)
        except Exception as error:
            failed.set_result(error)
            raise

    async with real() as service:
        service.servicer.on_session = give_up
        call = service.stub.PrefillSession()
        await call.write(wire.PrefillSessionRequest())
        async with asyncio.timeout(WAIT_S):
            assert not isinstance(await failed, grpc.aio.AbortError)
        call.cancel()


async def test_a_server_that_stops_breaks_its_calls_as_unavailable_and_takes_no_more(service: Service) -> None:
    call = service.decode()

    async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
        yield delta("first")
        await asyncio.Event().wait()

    service.servicer.on_stream = stream
    assert (await call.read()).delta.text == "first"

    await service.server.stop(None)

    assert (await error_of(call.read())).code() is grpc.StatusCode.UNAVAILABLE
    await happens(service.servicer.cancelled)
    assert (await error_of(service.release())).code() is grpc.StatusCode.UNAVAILABLE


async def test_a_server_that_stops_with_grace_lets_calls_finish(service: Service) -> None:
    go_on = asyncio.Event()

    async def answer(request: Any, context: Any) -> Any:
        await go_on.wait()
        return wire.ReleaseHandoffResponse(released=True)

    service.servicer.on_unary = answer
    call = service.release()
    await happens(service.servicer.begun)
    stopping = asyncio.create_task(service.server.stop(WAIT_S))
    await asyncio.sleep(0.05)
    go_on.set()

    assert (await call).released
    await stopping


async def test_a_channel_that_closes_waits_for_its_calls_and_then_cancels_them(service: Service) -> None:
    async def answer(request: Any, context: Any) -> Any:
        if request.lease_id == "short":
            return wire.ReleaseHandoffResponse(released=True)
        await asyncio.Event().wait()
        return None

    service.servicer.on_unary = answer
    call = asyncio.ensure_future(_awaited(service.release("long")))
    await happens(service.servicer.begun)

    await service.channel.close(0.1)

    with pytest.raises((asyncio.CancelledError, grpc.aio.AioRpcError)):
        await call
    await happens(service.servicer.cancelled)


async def _awaited(call: Any) -> Any:
    return await call


async def test_a_port_that_is_taken_cannot_be_bound(service: Service) -> None:
    # Only the simulated channel knows its address; a real one is skipped.
    place = service.channel._address if hasattr(service.channel, "_address") else None
    if place is None:
        pytest.skip("tests/pure/protos/test_wire.py asks it of real gRPC")
    with pytest.raises(RuntimeError):
        service.server.add_insecure_port(place)
