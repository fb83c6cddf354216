"""What guides have their readers write is what it says: facts that the built-in model knows, files that are read."""

import re
from pathlib import Path

import pytest

from builtin_model.vocabulary import KEYS, VALUES
from cluster_sim.workloads.traces import read_trace
from tests import ROOT

GUIDES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
# As in `k1=blue; `.
_FACT = re.compile(r"\b(k\d+)=([a-z]+); ")
# With the name of the file that a tutorial has its reader write.
_FILE = re.compile(r'^```\w+ title="([\w.]+)"\n(.*?)^```', re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
def test_the_built_in_model_knows_the_facts_of_examples(guide: Path) -> None:
    facts = _FACT.findall(guide.read_text())
    assert [f"{key}={value}" for key, value in facts if key not in KEYS or value not in VALUES] == []


def test_there_are_facts_in_the_guides() -> None:
    assert sum(len(_FACT.findall(guide.read_text())) for guide in GUIDES) > 20


def test_the_trace_of_the_guide_to_tuning_is_one(tmp_path: Path) -> None:
    files = dict(_FILE.findall((ROOT / "docs" / "tune.md").read_text()))
    (tmp_path / "requests.jsonl").write_text(files["requests.jsonl"])
    requests = read_trace(tmp_path / "requests.jsonl").requests
    assert [request.input_tokens for request in requests] == [1024, 1400, 600]
