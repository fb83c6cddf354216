"""A warning where other processes were busy during a measurement, so that its runs may not compare."""

from collections.abc import Iterable

from command_line.output import err

# Of the machine, during one run. Half a core taken from an engine of one thread makes everybody's tail longer.
_MOST_FOREIGN_CORES = 0.3


def warn_of_foreign_cores(by_run: Iterable[float]) -> None:
    most = max(by_run)
    if most > _MOST_FOREIGN_CORES:
        err.print(f"[yellow]other processes took up to {most} cores meanwhile: the runs may not compare[/yellow]")
