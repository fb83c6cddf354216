"""The collector of a router's process, in a process of its own."""

import subprocess
import sys

_LOOK = """
import gc
from control_plane.service.garbage import collect_rarely
collect_rarely()
print(gc.get_freeze_count() > 1000, len(gc.get_objects()) < 1000, gc.isenabled(), gc.get_threshold()[2] > 10)
"""


def test_what_stays_is_not_looked_at_again_and_full_collections_are_rare() -> None:
    told = subprocess.run([sys.executable, "-c", _LOOK], capture_output=True, text=True, check=True, timeout=60)
    assert told.stdout.split() == ["True"] * 4
