"""The file of keys: edited by one at a time, taken up while it is followed, and never half read."""

import asyncio
import fcntl
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cluster_core.errors import ConfigError
from cluster_wire.secret import read_secret, write_secret
from control_plane.access import key_file
from control_plane.access.api_keys import ApiKey, new_key
from control_plane.access.key_file import KeyFile, edit, read_keys
from control_plane.access.roles import Role


def _add(path: Path, name: str) -> ApiKey:
    key, _ = new_key(name, "acme", [Role.GENERATE], lowest_priority=0, now_s=0.0, expires_s=None)
    edit(path, lambda keys: keys.update({key.key_id: key}))
    return key


def test_an_edit_makes_the_file_for_its_owner_alone_and_keeps_what_others_chose(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    _add(path, "a")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o640)
    _add(path, "b")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert {key.name for key in read_keys(path).values()} == {"a", "b"}
    assert [each.name for each in tmp_path.iterdir()] == ["keys.json"]


def test_an_edit_goes_through_links_and_leaves_the_file_to_whom_it_belongs(tmp_path: Path) -> None:
    path, link = tmp_path / "keys.json", tmp_path / "elsewhere" / "keys.json"
    link.parent.mkdir()
    link.symlink_to(path)
    _add(path, "a")
    if os.geteuid() == 0:
        os.chown(path, 1234, 1234)
    before = path.stat()
    _add(link, "b")
    after = path.stat()
    assert link.is_symlink() and len(read_keys(path)) == 2
    assert (after.st_uid, after.st_gid) == (before.st_uid, before.st_gid)


def test_edits_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    names = [f"k{number}" for number in range(20)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda name: _add(path, name), names))
    assert sorted(key.name for key in read_keys(path).values()) == sorted(names)


def test_an_edit_that_fails_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    _add(path, "a")
    before = path.read_bytes()

    def fails(keys: dict[str, ApiKey]) -> None:
        keys.clear()
        raise ConfigError("no", field="name")

    with pytest.raises(ConfigError):
        edit(path, fails)
    assert path.read_bytes() == before


def test_a_file_that_is_none_is_refused_by_its_setting(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    for text in ("no json", "{}"):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"security\.keys_file: .*keys\.json.*no file of keys"):
            KeyFile(path, 1.0).read()
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="no file of keys"):
        KeyFile(path, 1.0).read()
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        KeyFile(tmp_path / "none", 1.0).read()
    with pytest.raises(ConfigError, match="cannot be changed"):
        _add(tmp_path / "no" / "such" / "folder", "a")


async def _until(holds: "asyncio.Event | object") -> None:
    async with asyncio.timeout(60):
        while not holds():  # type: ignore[operator]  # noqa: ASYNC110 - a file tells nobody
            await asyncio.sleep(0.001)


async def test_what_changes_is_taken_up_and_what_is_bad_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.json"
    first = _add(path, "a")
    keys = KeyFile(path, 0.001)
    keys.read()
    following = asyncio.create_task(keys.follow())
    try:
        _add(path, "b")
        await _until(lambda: len(keys.keys) == 2)
        good = path.read_text()
        path.write_text("[" * 200_000)
        await _until(lambda: "security.keys_file stays as it was" in caplog.text)
        assert len(keys.keys) == 2
        assert caplog.text.count("security.keys_file stays as it was") == 1
        path.write_text(good)
        await _until(lambda: "again" in caplog.text)
        edit(path, lambda those: those.pop(first.key_id))
        await _until(lambda: first.key_id not in keys.keys)
        with pytest.raises(TypeError):
            keys.keys["x"] = first  # type: ignore[index]
    finally:
        following.cancel()
        keys.close()


def test_a_file_that_has_not_changed_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys.json"
    _add(path, "a")
    keys = KeyFile(path, 1.0)
    keys.read()
    reads: list[Path] = []
    # The only way to see that a file is left alone.
    monkeypatch.setattr(key_file, "read_keys", reads.append)
    keys.read()
    assert not reads


def test_a_secret_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    write_secret(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_secret(path).service_key == read_secret(path).service_key
    with pytest.raises(ConfigError, match="is there already"):
        write_secret(path)
    with pytest.raises(ConfigError, match="cannot be written"):
        write_secret(tmp_path / "no" / "secret")


@pytest.mark.parametrize(
    "text", [b"", b"short", b"c2hvcnQ=", b"\xff" * 64, b"not base64 at all, but long enough to be one"]
)
def test_a_secret_that_is_none_is_refused_and_not_quoted(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "secret"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=r"security\.secret_file: .*32 bytes or more as base64") as raised:
        read_secret(path)
    assert "long enough" not in str(raised.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_secret(tmp_path / "none")


def test_a_file_that_somebody_else_holds_is_waited_for_a_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys.json"
    _add(path, "a")
    # Ten seconds would be most of this module's time.
    monkeypatch.setattr(key_file, "_LOCK_TIMEOUT_S", 0.05)
    held = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="somebody else changes it"):
            _add(path, "b")
    finally:
        os.close(held)
    _add(path, "b")
    assert len(read_keys(path)) == 2
