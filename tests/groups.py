"""Which tests run on one worker when they are spread over several, and which groups come first.

A group stays on one worker: what its tests share is started once. The tests of a folder below tests/integration are a
group, those that fork engines are one, and those of any other file. What takes longest comes first, so that at the end
no worker is left alone with it; what mostly waits runs beside what computes.
"""

from pathlib import PurePath

_ENGINE_PROCESSES = "engine processes"
# Their engines are forked from a server that each worker would have to start for itself (`tests.engine_process`).
FORKING_ENGINES = frozenset(
    f"tests/{name}.py"
    for name in (
        "campaign/fuzz/test_session_fuzz", "integration/test_block_events", "integration/test_decode_engine",
        "integration/test_frozen_pull", "integration/test_handoff", "integration/test_tiers_bench",
        "integration/test_tiers_on_the_engine",
    )
)  # fmt: skip
_LONGEST_FIRST = (
    "tests/integration/two_by_two", _ENGINE_PROCESSES, "tests/integration/test_alerts.py", "tests/integration/shared",
    "tests/process", "tests/integration", "tests/contract", "tests/campaign", "tests/pure",
)  # fmt: skip


def group_of(file: PurePath) -> str:
    """file: from the project's root."""
    if file.as_posix() in FORKING_ENGINES:
        return _ENGINE_PROCESSES
    is_shared = file.parts[:2] == ("tests", "integration") and len(file.parts) > 3
    return (file.parent if is_shared else file).as_posix()


def place_of(file: PurePath) -> int:
    """Lower comes first. Hosts come before all others."""
    group = group_of(file)
    return next((place for place, start in enumerate(_LONGEST_FIRST) if group.startswith(start)), 0)
