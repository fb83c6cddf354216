"""The file of a policy: kept over restarts, never half written, and moved aside when it is of no use."""

import json
import re
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster_core.errors import UnavailableError
from decode_worker.policy_store import PolicyFile, Restored
from decode_worker.stop_policies import POLICIES, Action, BatchState, Decision, PolicySettings, StopPolicy

MADE_FOR = {"model": "qwen", "hardware": "H100", "max_num_seqs": "256"}
ABSENT = Restored(loaded=False)


def taught(name: str = "q_learning") -> StopPolicy:
    policy = POLICIES[name](PolicySettings(horizon_batches=1), Random(0))
    policy.learn([Decision(BatchState(16, 9, 0), Action.STOP)], 1000.0, None)
    return policy


def new(name: str = "q_learning") -> StopPolicy:
    return POLICIES[name](PolicySettings(), Random(0))


def of(folder: Path, policy: str = "q_learning", **parts: str) -> PolicyFile:
    return PolicyFile(folder, policy, MADE_FOR | parts)


def changed(path: Path, **entries: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


@pytest.mark.parametrize("name", ["bandit", "q_learning"])
def test_what_was_saved_comes_back(tmp_path: Path, name: str) -> None:
    file, policy = of(tmp_path / "new" / "folder", name), new(name)
    assert file.restore(policy) == ABSENT
    file.save(taught(name).dump())
    assert of(tmp_path / "new" / "folder", name).restore(policy) == Restored(loaded=True)
    assert policy.table() == taught(name).table() != ()
    assert [each.name for each in file.path.parent.iterdir()] == [file.path.name]


def test_the_name_says_the_policy_and_what_the_table_was_made_for_in_any_order(tmp_path: Path) -> None:
    again = PolicyFile(tmp_path, "bandit", dict(reversed(MADE_FOR.items())))
    assert of(tmp_path, "bandit").path == again.path
    policy, _, digest = again.path.stem.rpartition("-")
    assert (policy, len(digest), again.path.suffix) == ("bandit", 12, ".json")
    others = [of(tmp_path), of(tmp_path, "bandit", model="llama"), of(tmp_path, "bandit", driver="1")]
    assert len({again.path, *(each.path for each in others)}) == 4


def test_another_model_starts_empty_and_leaves_the_table_of_the_first(tmp_path: Path) -> None:
    of(tmp_path).save(taught().dump())
    assert of(tmp_path, model="llama").restore(new()) == ABSENT
    assert of(tmp_path).restore(new()).loaded


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ({"format": 2}, "its format is 2, this version reads 1"),
        ({"format": None}, "its format is None, this version reads 1"),
        ({"policy": "bandit"}, "it is of policy 'bandit', not q_learning"),
        ({"made_for": {**MADE_FOR, "model": "llama"}}, "it was made for .*llama.*, not for .*qwen"),
        ({"made_for": None}, "it was made for None, not for"),
        ({"table": None}, "expected the entries values, epsilon, found NoneType"),
        ({"table": {"values": [[1]], "epsilon": 1.0}}, r"not a learned value: \[1\]"),
        ({"more": 1}, "expected the entries format, policy, made_for, table, found .*more"),
    ],
)
def test_a_file_of_something_else_is_moved_aside_with_the_reason(
    tmp_path: Path, entries: dict[str, Any], problem: str
) -> None:
    file, policy = of(tmp_path), taught()
    file.save(taught().dump())
    changed(file.path, **entries)
    content = file.path.read_text()
    restored = file.restore(policy)
    assert not restored.loaded
    assert restored.problem.startswith(f"{file.path} is not used: ")
    assert restored.problem.endswith(f"it was moved to {file.path.name}.stale")
    assert re.search(problem, restored.problem)
    assert policy.dump() == taught().dump()
    assert file.stale_path.read_text() == content
    assert file.restore(policy) == ABSENT


BROKEN = [b"", b"{", b"[]", b"null", b'{"format": 1}', b"\xff\xfe\x00", b"[" * 100_000, b" " * (2**20 + 1), b"1" * 5000]


@pytest.mark.parametrize("content", BROKEN, ids=range(len(BROKEN)))
def test_a_broken_file_is_moved_aside(tmp_path: Path, content: bytes) -> None:
    file = of(tmp_path)
    file.path.write_bytes(content)
    restored = file.restore(new())
    assert (restored.loaded, file.stale_path.read_bytes()) == (False, content)
    assert "is not used: it" in restored.problem or "is not used: expected" in restored.problem


anything = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.sampled_from(["add", "0", "5+", "9-16"])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=7), st.dictionaries(st.sampled_from(["values", "epsilon"]), inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(table=anything)
def test_no_table_whatever_keeps_a_worker_from_starting(tmp_path: Path, table: Any) -> None:
    file, policy = of(tmp_path), taught()
    file.save(taught().dump())
    changed(file.path, table=table)
    restored = file.restore(policy)
    assert restored.loaded is not bool(restored.problem)
    assert restored.loaded or policy.dump() == taught().dump()
    json.dumps(policy.dump(), allow_nan=False)


def test_a_file_larger_than_any_table_is_not_even_parsed(tmp_path: Path) -> None:
    file = of(tmp_path)
    file.save(taught().dump())
    file.path.write_bytes(file.path.read_bytes() + b" " * 2**20)
    assert "it has more than 1048576 bytes" in file.restore(new()).problem


def test_only_the_last_useless_file_is_kept(tmp_path: Path) -> None:
    file = of(tmp_path)
    for content in ("first", "second"):
        file.path.write_text(content)
        file.restore(new())
    assert [each.read_text() for each in tmp_path.iterdir()] == ["second"]


def test_a_folder_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    file = of(tmp_path / "file" / "folder")
    with pytest.raises(UnavailableError, match=r"what policy q_learning learned could not be saved: .*file"):
        file.save(taught().dump())


def test_a_folder_that_cannot_be_read_is_a_problem_and_not_an_error(tmp_path: Path) -> None:
    file = of(tmp_path)
    file.path.mkdir()
    file.stale_path.write_text("in the way")
    restored = file.restore(new())
    assert not restored.loaded
    assert "is not used" in restored.problem
    assert "could not be moved aside" in restored.problem


@pytest.mark.parametrize("fails", ["write_text", "replace"])
def test_a_save_that_fails_leaves_the_earlier_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    file, policy = of(tmp_path), new()
    file.save(taught().dump())
    write = Path.write_text

    def no_space(path: Path, *given: Any) -> int:
        if fails == "write_text":
            write(path, "half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(UnavailableError, match="No space left"):
        patched.setattr(Path, fails, no_space)
        file.save({})
    assert list(tmp_path.iterdir()) == [file.path]
    assert file.restore(policy).loaded
    assert policy.dump() == taught().dump()
