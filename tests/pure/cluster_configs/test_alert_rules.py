"""The shipped alert rules say what a reader at night needs."""

import pytest

from tests.prometheus import alert_rules


@pytest.mark.parametrize("name", alert_rules())
def test_an_alert_says_how_urgent_it_is_and_what_to_read(name: str) -> None:
    rule = alert_rules()[name]
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert rule["annotations"]["summary"].endswith(".")
    assert rule["annotations"]["description"].endswith(".")
    assert rule["annotations"]["runbook_url"] == f"docs/runbooks/{name}.md"
