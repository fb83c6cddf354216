"""Which tests run on one worker when they are spread over several, and which groups come first.

A group stays on one worker: what its tests share is started once. The tests of a folder below tests/integration are a
group, those that fork engines are two, and those of any other file. What takes longest comes first, so that at the end
no worker is left alone with it; what mostly waits runs beside what computes.
"""

from pathlib import PurePath

# Their engines are forked from a server that each worker starts for itself (`tests.engine_process`): two of them do,
# not all.
FORKING_ENGINES = {
    "engines": tuple(
        f"tests/integration/test_{name}.py" for name in ("between_steps", "decode_engine", "real_session_fuzz")
    ),
    "pairs of engines": tuple(
        f"tests/integration/test_{name}.py"
        for name in (
            "block_events",
            "frozen_pull",
            "hand_over",
            "handoff",
            "imitated_pair",
            "model_families",
            "shared_workers",
            "tiers_bench",
            "tiers_on_the_engine",
        )
    ),
}
_FORKING_GROUP = {file: group for group, files in FORKING_ENGINES.items() for file in files}
_LONGEST_FIRST = (
    "tests/integration/shared", "tests/integration/two_by_two", *FORKING_ENGINES,
    "tests/integration/test_adapters.py", "tests/integration/test_alerts.py", "tests/integration/test_access.py",
    "tests/integration/test_head_dies.py", "tests/process", "tests/integration", "tests/contract", "tests/campaign",
    "tests/pure",
)  # fmt: skip


def group_of(file: PurePath) -> str:
    """file: from the project's root."""
    if file.as_posix() in _FORKING_GROUP:
        return _FORKING_GROUP[file.as_posix()]
    is_shared = file.parts[:2] == ("tests", "integration") and len(file.parts) > 3
    return (file.parent if is_shared else file).as_posix()


def place_of(file: PurePath) -> int:
    """Lower comes first. Hosts come before all others."""
    group = group_of(file)
    return next((place for place, start in enumerate(_LONGEST_FIRST) if group.startswith(start)), 0)
