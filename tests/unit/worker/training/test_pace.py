"""Inner steps by speed: who is slower goes further with each step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.training.replica import Pace


def measured(inner_steps: int, own_s: float, fastest_s: float, *, unequal: bool = True) -> Pace:
    pace = Pace(inner_steps, unequal=unequal)
    for _ in range(30):
        pace.stepped(own_s)
    pace.fastest_s = fastest_s
    return pace


@pytest.mark.parametrize(
    ("own_s", "fastest_s", "steps"),
    [(0.1, 0.1, 50), (0.2, 0.1, 25), (0.5, 0.1, 10), (30.0, 0.1, 1), (0.105, 0.1, 50)],
    ids=["as fast", "half", "a fifth", "hardly any", "within the noise"],
)
def test_steps_of_a_period_follow_the_speed(own_s: float, fastest_s: float, steps: int) -> None:
    assert measured(50, own_s, fastest_s).steps_per_period == steps


@given(st.integers(1, 200), st.floats(1.0, 30.0))
def test_a_period_takes_as_many_strides_as_it_has_steps(inner_steps: int, times: float) -> None:
    pace = measured(inner_steps, 0.1 * times, 0.1)
    strides = [pace.stride() for _ in range(10 * pace.steps_per_period)]
    assert min(strides) >= 1
    assert abs(sum(strides) - 10 * inner_steps) <= 1


def test_all_go_step_by_step_unless_asked_to_differ() -> None:
    pace = measured(20, 1.0, 0.1, unequal=False)
    assert [pace.stride() for _ in range(5)] == [1] * 5
    assert Pace(20, unequal=True).stride() == 1  # nothing is known at first


def test_first_steps_are_not_looked_at() -> None:
    pace = Pace(20, unequal=True)
    for seconds in (9.0, 5.0, 2.0, 1.0):
        pace.stepped(seconds)
    assert pace.step_s == 0
    pace.stepped(0.5)
    assert pace.step_s == 0.5


def test_others_are_told_of_changes_that_matter() -> None:
    pace = measured(20, 0.5, 0.5)
    assert pace.step_s == 0.5
    for _ in range(16):
        pace.stepped(0.53)
    assert pace.step_s == 0.5
    for _ in range(16):
        pace.stepped(0.6)
    assert pace.step_s == 0.6
