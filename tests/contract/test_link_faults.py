"""What the simulation's transport does to calls when a link or a server fails; nothing real can be asked for it."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from rachis.v1 import worker_pb2 as wire

from fault_sim import virtual_time
from fault_sim.network import BREAK_S, Link
from tests.contract.transport_service import Service, delta, error_of, local


def link_of(service: Service) -> Link:
    [link] = service.channel.network.links()
    return link  # type: ignore[no-any-return]


async def _answer(request: Any, context: Any) -> Any:
    return wire.ReleaseHandoffResponse(released=True)


async def _endless(request: Any, context: Any) -> AsyncIterator[Any]:
    while True:
        yield delta("again")
        await asyncio.sleep(1)


def test_a_cut_link_delays_a_call_until_it_is_healed() -> None:
    async def main() -> None:
        async with local() as service:
            service.servicer.on_unary = _answer
            await service.release()
            link_of(service).cut()
            call = asyncio.ensure_future(service.release())
            await asyncio.sleep(BREAK_S / 2)
            assert not call.done()

            link_of(service).heal()

            assert (await call).released

    virtual_time.run(main())


def test_a_link_that_stays_cut_breaks_its_calls_at_both_ends() -> None:
    async def main() -> None:
        async with local() as service:
            service.servicer.on_stream = _endless
            call = service.decode()
            await call.read()
            began_s = asyncio.get_running_loop().time()
            link_of(service).cut()

            error = await error_of(_all(call))

            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert asyncio.get_running_loop().time() - began_s >= BREAK_S
            await service.servicer.cancelled.wait()

    virtual_time.run(main())


def test_a_reset_is_noticed_by_the_client_at_once_and_by_the_server_later() -> None:
    async def main() -> None:
        async with local() as service:
            service.servicer.on_stream = _endless
            call = service.decode()
            await call.read()

            link_of(service).reset(7.0)

            assert (await error_of(_all(call))).code() is grpc.StatusCode.UNAVAILABLE
            await asyncio.sleep(6.5)
            assert not service.servicer.cancelled.is_set()
            await asyncio.sleep(1)
            assert service.servicer.cancelled.is_set()

    virtual_time.run(main())


def test_a_killed_server_breaks_its_calls_and_refuses_new_ones() -> None:
    async def main() -> None:
        async with local() as service:
            service.servicer.on_stream = _endless
            call = service.decode()
            await call.read()

            service.server.kill()

            assert (await error_of(_all(call))).code() is grpc.StatusCode.UNAVAILABLE
            assert (await error_of(service.release())).code() is grpc.StatusCode.UNAVAILABLE
            await service.server.ended()

    virtual_time.run(main())


def test_a_request_that_is_repeated_arrives_twice_and_is_answered_once() -> None:
    async def main() -> None:
        async with local() as service:
            asked: list[str] = []

            async def answer(request: Any, context: Any) -> Any:
                asked.append(request.lease_id)
                return wire.ReleaseHandoffResponse(released=len(asked) == 1)

            service.servicer.on_unary = answer
            await service.release("first")
            link_of(service).repeats = 1.0

            assert not (await service.release("second")).released
            await asyncio.sleep(5)
            assert asked == ["first", "second", "second"]

    virtual_time.run(main())


async def _all(call: Any) -> None:
    async for _ in call:
        pass
