"""The most telling journeys, line by line."""

from tests.pure.control_plane.dispatch.journey_script import FILE, rendered


def test_the_most_telling_journeys_go_line_by_line_as_they_are_written_down() -> None:
    """A line that changes on purpose: `python -m tests.pure.control_plane.dispatch.journey_script`."""
    written = FILE.read_text()
    stories = "\n".join(line for line in written.splitlines() if line.partition("->")[0].strip() or not line)
    assert rendered(stories) == written
