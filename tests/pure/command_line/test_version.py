"""`rachis --version`."""

from typer.testing import CliRunner

from cluster_core import versions
from command_line.main import app


def test_the_versions_are_shown_of_all_that_hosts_have_to_have_alike() -> None:
    shown = CliRunner().invoke(app, ["--version"])
    assert (shown.exit_code, shown.output.strip()) == (0, str(versions.installed()))
