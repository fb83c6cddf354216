"""The garbage collector of a router's process, which stops all of it for as long as it looks at all that lives."""

import gc

# Of CPython, where full collections come with every tenth of the middle ones: here with every hundredth. Requests and
# sessions leave nothing for it (tests/process/control_plane/sessions/test_session_garbage.py).
_THRESHOLDS = (700, 10, 100)


def collect_rarely() -> None:
    """Called once, when all that stays is there: modules, configuration, services. It is not looked at again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
