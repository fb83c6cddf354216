"""What the adapters of frameworks hold ends with what they were used from."""

import asyncio
import gc
import threading
import weakref
from typing import Any

from rachis.shared_client import SharedClient

# Nobody listens there, and nobody is called.
NOWHERE = "127.0.0.1:1"


def own_threads() -> int:
    return sum(thread.name == "rachis-client" for thread in threading.enumerate())


def test_the_client_of_a_loop_that_has_ended_is_let_go_with_the_next_one() -> None:
    shared, clients = SharedClient(NOWHERE, api_key=""), list[Any]()

    async def use() -> None:
        clients.append(weakref.ref(shared.here()))
        assert shared.here() is clients[-1]()

    for _ in range(3):
        asyncio.run(use())
    gc.collect()
    assert [client() is not None for client in clients] == [False, False, True]


def test_loops_of_other_threads_come_and_go_meanwhile() -> None:
    shared, comes = SharedClient(NOWHERE, api_key=""), asyncio.new_event_loop()

    class Ended(asyncio.SelectorEventLoop):
        """While it is asked, another thread asks, which lets go of it and has a client for a loop of its own."""

        def is_closed(self) -> bool:
            if has_ended and not comes.is_running() and not comes.is_closed():
                other = threading.Thread(target=lambda: comes.run_until_complete(use()))
                other.start()
                other.join()
            return super().is_closed()

    async def use() -> None:
        shared.here()

    has_ended: list[bool] = []
    ended = Ended()
    ended.run_until_complete(use())
    ended.close()
    has_ended.append(True)
    asyncio.run(use())
    comes.run_until_complete(use())
    comes.close()


def test_an_object_that_is_gone_leaves_no_thread() -> None:
    before = own_threads()
    many = [SharedClient(NOWHERE, api_key="") for _ in range(3)]
    for each in many:
        assert each.wait(asyncio.sleep(0, True))
    assert own_threads() == before + 3
    ending = [thread for thread in threading.enumerate() if thread.name == "rachis-client"]
    del many, each
    gc.collect()
    for thread in ending[-3:]:
        thread.join(60)
    assert own_threads() == before
