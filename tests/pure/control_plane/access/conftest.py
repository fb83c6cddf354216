"""Keys are hashed at the least cost here."""

import pytest

from control_plane.access import api_keys


@pytest.fixture(autouse=True)
def cheap_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    # What guessing is to cost is private; it takes 50 ms a hash, and these tests make hundreds.
    monkeypatch.setattr(api_keys, "_COST", {"n": 2, "r": 8, "p": 1})
