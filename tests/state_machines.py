"""State machines that have to notice a bug planted by the test."""

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

# Examples of one seed. Few, so that Hypothesis comes to long ones soon.
_EXAMPLES = 20


def expect_noticed(machine: type[RuleBasedStateMachine], *, first_seed: int = 0, seeds: int = 50) -> None:
    """Some run of the machine breaks; always the same ones are tried, and what breaks is not made smaller.

    first_seed: one that was found to notice the bug soon; after a change of the machine it may take some of the others.
    """
    with pytest.raises(Exception):  # noqa: B017 - whatever breaks first
        for each in range(first_seed, first_seed + seeds):
            _run(machine, each)


def _run(machine: type[RuleBasedStateMachine], chosen: int) -> None:
    quick = settings(
        max_examples=_EXAMPLES,
        stateful_step_count=50,
        deadline=None,
        database=None,
        print_blob=False,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    seeded = seed(chosen)(type(machine.__name__, (machine,), {}))
    run_state_machine_as_test(seeded, settings=quick)
