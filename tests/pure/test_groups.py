"""What shares services or forked engines is one group of tests."""

import re
from pathlib import PurePath

from tests import ROOT
from tests.groups import FORKING_ENGINES, group_of, place_of

_FORKS = re.compile(r"^from tests\.(engine_process|integration\.worker_processes) import", re.MULTILINE)


def test_whatever_forks_engines_is_in_a_group_of_its_own_and_nothing_else() -> None:
    files = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / "tests").rglob("test_*.py")}
    forking = {name for name, path in files.items() if _FORKS.search(path.read_text())}
    assert forking == {name for names in FORKING_ENGINES.values() for name in names}
    for group, names in FORKING_ENGINES.items():
        assert {name for name in files if group_of(PurePath(name)) == group} == set(names)


def test_modules_of_a_folder_that_shares_a_service_are_a_group_and_others_one_each() -> None:
    shared = ROOT / "tests/integration/shared"
    assert {group_of(path.relative_to(ROOT)) for path in shared.glob("test_*.py")} == {"tests/integration/shared"}
    assert group_of(PurePath("tests/process/a/test_b.py")) == "tests/process/a/test_b.py"
    assert group_of(PurePath("tests/integration/test_faults.py")) == "tests/integration/test_faults.py"


def test_what_takes_longest_comes_first() -> None:
    order = ("integration/two_by_two/test_a", "integration/test_handoff", "process/test_a", "pure/test_a")
    places = [place_of(PurePath(f"tests/{name}.py")) for name in order]
    assert places == sorted(set(places))
