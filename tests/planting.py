"""The one way in which a test plants a bug; for several processes or whole campaigns: the tables `planted*.py`."""

import pytest


def planted(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, wrong: object) -> None:
    """Puts a wrong implementation in the place of a right one until the test ends.

    A test that finds nothing wrong shows that nothing is wrong only where it finds what was planted. A bug has no port
    to come in by: what is replaced may be private. What a part needs of others is no bug, and is given to it instead.
    """
    monkeypatch.setattr(owner, name, wrong)
