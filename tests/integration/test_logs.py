"""Logs of a service whose workers are Ray's: what they wrote, and what one that was killed wrote before its end.

Its GPUs are imitated: nothing here is about an engine.
"""

import os
import signal
from pathlib import Path

import pytest
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import worker_pb2 as wire

from benchmarks.validation import imitated
from cluster_core.event_log import beginning
from tests.integration.conftest import own_service, until

pytestmark = pytest.mark.integration

FLAGS = {
    **imitated.SETTINGS,
    "engine.cost_model": "h100-llama-3.1-8b",
    "pools.prefill.workers": 1,
    "pools.decode.workers": 1,
    "log_level": "INFO",
}


async def test_the_logs_of_router_and_workers_are_read_those_of_a_killed_worker_too(tmp_path: Path) -> None:
    flags = {key.replace(".", "__"): value for key, value in FLAGS.items()}
    async with own_service(tmp_path, **flags) as (_, client):

        async def begun() -> list[str]:
            """Whose logs have begun, one name for each process; nobody's where not all is read in time."""
            told = await client.admin.GetLogs(admin.GetLogsRequest(query=wire.LogQuery(most_events=2000)))
            found = [event.process for event in told.events if event.message == beginning(status.service_id)]
            return [] if told.missing else sorted(found)

        status = await client.router_status()
        assert await until(begun, "all logs are read") == ["decode-0", "prefill-0", "router"]
        (killed,) = [view for view in await client.workers() if view.registration.worker_id == "decode-0"]
        os.kill(killed.registration.pid, signal.SIGKILL)

        async def begun_again() -> bool:
            return await begun() == ["decode-0", "decode-0", "prefill-0", "router"]

        await until(begun_again, "the next start of the worker logs, beside what the first one left")
