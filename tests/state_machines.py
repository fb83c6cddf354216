"""State machines that have to notice a bug planted by the test."""

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test


def expect_noticed(machine: type[RuleBasedStateMachine], most_examples: int = 500) -> None:
    """Some run of the machine breaks; always the same ones are tried, and what breaks is not made smaller."""
    quick = settings(
        max_examples=most_examples,
        stateful_step_count=50,
        deadline=None,
        database=None,
        derandomize=True,
        print_blob=False,
        phases=(Phase.generate,),
    )
    with pytest.raises(Exception):  # noqa: B017 - whatever breaks first
        run_state_machine_as_test(machine, settings=quick)
