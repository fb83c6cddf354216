"""Keys, tenants and prompts of callers are in no log, at any level and whatever becomes of their calls."""

from pathlib import Path

import grpc
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import worker_pb2 as wire

from cluster_core.event_log import LogRules, logged
from tests.process.control_plane.access.conftest import Code, Keyed, bearer

WRONG = "rk-0123456789abcdef-of-nobody"


async def test_no_key_is_in_the_log_whether_it_is_good_or_not(keyed: Keyed, tmp_path: Path) -> None:
    file = tmp_path / "router.log"
    with logged("svc-test", "router", LogRules("DEBUG", "json"), file):
        await keyed.generate("generate", request_id="ask-1")
        keyed.key["stranger"] = WRONG
        for who in ("stranger", "observe"):
            refused = await keyed.refused(keyed.generate(who))
            assert refused.code() in (Code.UNAUTHENTICATED, Code.PERMISSION_DENIED)
        keyed.cluster.calls -= 2
    text = file.read_text()
    assert "ask-1" in text
    for secret in (*keyed.key.values(), "hello there", (tmp_path / "secret").read_text().strip()):
        assert not secret or secret not in text


async def test_logs_are_for_those_who_operate(keyed: Keyed) -> None:
    asked = admin.GetLogsRequest(query=wire.LogQuery(level="ERROR"))
    refused = await keyed.refused(keyed.cluster.admin.GetLogs(asked, metadata=keyed.metadata("observe")))
    assert refused.code() is grpc.StatusCode.PERMISSION_DENIED
    await keyed.cluster.admin.GetLogs(asked, metadata=bearer(keyed.key["operate"]))
