"""Messages as JSON and back, and the files of the page."""

import json

import pytest
from rachis.v1 import admin_pb2 as admin

from cluster_core.errors import InvalidInputError
from control_plane.access.roles import RPC_NEEDS
from control_plane.console.admin_calls import METHODS
from control_plane.console.json_calls import is_streamed, json_of, request_of
from control_plane.console.static_files import SECURITY_HEADERS, static_files
from tests import ROOT


def test_every_call_has_a_need_of_its_own_and_none_brings_a_prompt() -> None:
    assert set(METHODS.values()) <= RPC_NEEDS.keys()
    assert not {"Generate", "StreamGenerate", "Resume", "LookupPrefix", "ExplainPlacement"} & METHODS.keys()


def test_a_body_becomes_the_message_of_the_call() -> None:
    assert request_of("ListRequests", b'{"running": 3}') == admin.ListRequestsRequest(running=3)
    assert request_of("GetOverview", b"") == admin.GetOverviewRequest()


@pytest.mark.parametrize(
    "body",
    [b"{", b"[]", b"\xff", b'{"running": "many"}', b'{"running": -1}', b'{"no_such": 1}', b"[" * 5000, b"null", b"NaN"],
)
def test_what_is_no_message_is_refused_in_a_sentence(body: bytes) -> None:
    with pytest.raises(InvalidInputError, match="body: is no ListRequestsRequest in JSON"):
        request_of("ListRequests", body)


def test_fields_keep_their_names_and_those_that_are_zero_are_told() -> None:
    told = json.loads(json_of(admin.PoolOverview(running_requests=2)))
    assert told["running_requests"] == 2 and told["waiting_requests"] == 0 and "desired_workers" not in told


def test_names_stay_text_whatever_they_say() -> None:
    row = admin.WorkerRow(worker_id="</script><script>alert(1)</script>\u2028")
    assert json.loads(json_of(row))["worker_id"] == row.worker_id


def test_calls_that_tell_how_they_go_are_streams() -> None:
    assert {name for name in METHODS if is_streamed(name)} == {
        "WatchOverview", "ScalePools", "RemoveWorker", "RestartWorkers",
    }  # fmt: skip


def test_the_page_is_made_of_files_of_this_package_and_asks_for_no_others() -> None:
    files = static_files()
    assert files["/"].content_type.startswith("text/html")
    assert "/static/vendor/htm-preact.js" in files and "/static/views/now.js" in files
    for path, file in files.items():
        if "vendor" not in path and path != "/static/runbooks.json":
            text = file.body.decode().replace("http://www.w3.org/2000/svg", "")
            assert "http://" not in text and "https://" not in text, path


def test_nothing_of_the_page_stands_in_its_html_and_no_text_becomes_markup() -> None:
    page = static_files()["/"].body.decode()
    assert "<script>" not in page and "style=" not in page and "onclick" not in page
    for path, file in static_files().items():
        if path.endswith(".js") and "vendor" not in path:
            assert not {"innerHTML", "eval(", "document.write", "Date.now", "new Date"} & {
                word for word in ("innerHTML", "eval(", "document.write", "Date.now", "new Date")
                if word in file.body.decode()
            }, path  # fmt: skip
    assert "unsafe" not in SECURITY_HEADERS["Content-Security-Policy"]


def test_the_vendored_library_has_its_licences() -> None:
    folder = ROOT / "control_plane" / "console" / "static" / "vendor"
    assert "Apache License" in (folder / "htm-LICENSE.txt").read_text()
    assert "MIT" in (folder / "preact-LICENSE.txt").read_text()
