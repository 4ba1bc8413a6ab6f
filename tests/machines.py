"""How long Hypothesis plays with a state machine."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test


def play(machine: type[RuleBasedStateMachine], *, games: int, steps: int) -> None:
    """So many games of so many steps; one that fails is printed so that it can be played again."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=games,
            stateful_step_count=steps,
            print_blob=True,
            suppress_health_check=[HealthCheck.too_slow],  # two cores may be busy with other tests
        ),
    )
