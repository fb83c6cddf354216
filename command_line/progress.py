"""Progress bars of measurements and simulations, drawn so that they do not disturb what is timed."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, ProgressColumn, TaskID, TextColumn, TimeElapsedColumn

from command_line.output import err


def quiet_progress(*columns: ProgressColumn, hidden: bool = False) -> Progress:
    """On standard error, gone at the end; nothing where there is no terminal or it is `hidden`."""
    # Drawing takes the processor from what is timed: once a second is enough.
    return Progress(*columns, console=err, refresh_per_second=1, disable=hidden or not err.is_terminal, transient=True)


class ProgressReports:
    """A measurement's reports as a progress bar; a line for each phase where there is no terminal."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def phase(self, text: str) -> None:
        self._progress.update(self._task, description=text)
        if not err.is_terminal:
            err.print(text, markup=False)

    def total(self, steps: int) -> None:
        self._progress.update(self._task, total=steps)

    def done(self, steps: int = 1) -> None:
        self._progress.advance(self._task, steps)


@contextmanager
def progress_reports() -> Iterator[ProgressReports]:
    with quiet_progress(TextColumn("{task.description:<20}"), BarColumn(), TimeElapsedColumn()) as progress:
        yield ProgressReports(progress, progress.add_task("starting", total=None))
