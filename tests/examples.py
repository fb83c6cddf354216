"""How many examples Hypothesis tries: few, and always the same ones, on every commit; many with RACHIS_WIDE=1.

The wide runs (`make fuzz`) draw new examples each time, but for those of CI, which are always the same too.
"""

import os

from hypothesis import HealthCheck, settings

WIDE = os.environ.get("RACHIS_WIDE") == "1"
# What a property that says nothing is tried with, and Hypothesis's own number in wide runs.
_FEW, _MANY = 10, 100


def examples(wide: int, few: int = _FEW, *, steps: int = 50) -> settings:
    """For a property, or the TestCase of a state machine. steps: of a state machine, at most, in one example."""
    return settings(
        max_examples=wide if WIDE else few,
        stateful_step_count=steps,
        derandomize=not WIDE or "CI" in os.environ,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )


def seeds(wide: int, few: int) -> range:
    """For a test that draws by itself."""
    return range(wide if WIDE else few)


def load() -> None:
    """For all properties with no settings of their own."""
    settings.register_profile("rachis", examples(_MANY))
    settings.load_profile("rachis")
