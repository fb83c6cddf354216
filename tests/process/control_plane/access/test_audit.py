"""What changes things is written down: who, what, and how it ended."""

import json
from pathlib import Path
from typing import Any

import grpc
import pytest
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import router_pb2 as api

from control_plane.access.roles import Role
from tests.fakes.cluster import running_cluster
from tests.process.control_plane.access.conftest import Keyed


async def test_what_changes_things_is_written_down_with_who_and_how_it_ended(keyed: Keyed) -> None:
    drain = admin.DrainWorkerRequest(worker_id="decode-0")
    await keyed.cluster.admin.DrainWorker(drain, metadata=keyed.metadata("operate"))
    await keyed.refused(keyed.cluster.admin.DrainWorker(drain, metadata=keyed.metadata("observe")))
    await keyed.refused(keyed.cluster.admin.DrainWorker(drain))
    nobody = admin.ResumeWorkerRequest(worker_id="decode-9")
    await keyed.refused(keyed.cluster.admin.ResumeWorker(nobody, metadata=keyed.metadata("operate")))
    await keyed.cluster.admin.ListWorkers(admin.ListWorkersRequest(), metadata=keyed.metadata("operate"))
    lines = keyed.written()
    assert [(line["key"], line["call"], line["status"]) for line in lines] == [
        ("operate", "DrainWorker", "OK"),
        ("observe", "DrainWorker", "PERMISSION_DENIED"),
        (None, "DrainWorker", "UNAUTHENTICATED"),
        ("operate", "ResumeWorker", "NOT_FOUND"),
    ]
    assert lines[0]["request"] == {"worker_id": "decode-0"} and lines[1]["request"] is None
    assert lines[0]["address"] == "127.0.0.1" and lines[0]["tenant"] == "acme"
    assert keyed.key["operate"] not in keyed.audit_file.read_text()


async def test_a_call_that_tells_how_it_goes_is_written_down_when_it_begins(keyed: Keyed) -> None:
    call: Any = keyed.cluster.admin.ScalePools(
        admin.ScalePoolsRequest(decode_workers=3), metadata=keyed.metadata("ops")
    )
    with pytest.raises(grpc.aio.AioRpcError):
        async for _ in call:
            pass
    assert [(line["status"], line["request"]) for line in keyed.written()] == [
        ("BEGUN", {"decode_workers": 3}),
        ("UNIMPLEMENTED", {"decode_workers": 3}),
    ]


async def test_strangers_fill_no_disk(keyed: Keyed) -> None:
    for _ in range(50):
        await keyed.refused(keyed.cluster.admin.DrainWorker(admin.DrainWorkerRequest(worker_id="decode-0")))
    assert len(keyed.written()) < 10


async def test_a_log_that_cannot_be_written_keeps_no_call_from_its_answer(
    keyed: Keyed, caplog: pytest.LogCaptureFixture
) -> None:
    keyed.audit_file.parent.rename(keyed.audit_file.parent.with_suffix(".away"))
    drain = admin.DrainWorkerRequest(worker_id="decode-0")
    await keyed.cluster.admin.DrainWorker(drain, metadata=keyed.metadata("operate"))
    assert "is not written down" in caplog.text


async def test_the_audit_log_goes_on_where_its_file_is_moved_away(keyed: Keyed) -> None:
    drain = admin.DrainWorkerRequest(worker_id="decode-0")
    await keyed.cluster.admin.DrainWorker(drain, metadata=keyed.metadata("operate"))
    keyed.audit_file.rename(keyed.audit_file.with_suffix(".1"))
    await keyed.cluster.admin.DrainWorker(drain, metadata=keyed.metadata("operate"))
    assert len(keyed.written()) == 1


async def test_without_keys_everybody_is_anybody(tmp_path: Path) -> None:
    audit = tmp_path / "audit.jsonl"
    async with running_cluster(security__audit_file=str(audit)) as cluster:
        told = await cluster.api.GetIdentity(api.GetIdentityRequest())
        assert (told.name, told.tenant, list(told.roles)) == ("anybody", "", sorted(Role))
        call = cluster.admin.UnloadAdapter(admin.UnloadAdapterRequest(name="a"))
        with pytest.raises(grpc.aio.AioRpcError):
            await call
    (line,) = [json.loads(each) for each in audit.read_text().splitlines()]
    assert (line["key"], line["call"], line["status"]) == ("anybody", "UnloadAdapter", "NOT_FOUND")
