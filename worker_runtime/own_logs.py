"""What the workers of a service have logged on this host: Ray keeps the standard error of each in a file of its own."""

from pathlib import Path

from cluster_core.event_log import LogEvent
from cluster_core.log_files import LogQuery, ReadLogs, Told, read_of_service

# Those that Ray has begun anew included.
_FILES = "worker-*.err*"


def no_logs(query: LogQuery) -> Told[LogEvent]:
    """Of a worker whose standard error is kept nowhere."""
    return Told(())


def reader(service_id: str) -> ReadLogs:
    """Reads what this process and those beside it have written, also those that are gone."""
    folder = _folder()
    if folder is None:
        return no_logs
    return lambda query: read_of_service(folder, _FILES, service_id, query)


def _folder() -> Path | None:
    """Where the file of this process's standard error lies; None where it is no file."""
    try:
        file = Path("/proc/self/fd/2").readlink()
    except OSError:
        return None
    return file.parent if file.is_file() else None
