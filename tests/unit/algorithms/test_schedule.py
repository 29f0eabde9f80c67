"""The schedule: exact periods and offsets, and every sent round applied exactly once."""

import itertools

import pytest
from hypothesis import example, given, strategies as st

from murmuration.algorithms.schedule import Due, Schedule
from tests.support.specification import applies


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    inner_steps = draw(st.integers(1, 30))
    return Schedule(
        fragments=draw(st.integers(1, inner_steps)),
        inner_steps=inner_steps,
        overlap_steps=draw(st.integers(0, inner_steps)),
        steps=draw(st.integers(1, 4 * inner_steps + 1)),
    )


def send_steps(schedule: Schedule, fragment: int) -> list[int]:
    """The steps after which a fragment is sent, by asking about every step."""
    steps = range(1, schedule.steps + 1)
    return [step for step in steps for due in schedule.sends(step) if due.fragment == fragment]


def plan(**changes: int) -> Schedule:
    return Schedule(**{"fragments": 1, "inner_steps": 4, "overlap_steps": 0, "steps": 10} | changes)


@given(schedules())
def test_every_fragment_syncs_every_h_steps_exactly_and_at_the_end(schedule):
    for fragment in range(schedule.fragments):
        steps = send_steps(schedule, fragment)
        assert steps[0] == min(schedule.offset(fragment), schedule.steps)
        assert steps[-1] == schedule.steps
        gaps = [later - earlier for earlier, later in itertools.pairwise(steps)]
        assert all(gap == schedule.inner_steps for gap in gaps[:-1])
        assert all(0 < gap <= schedule.inner_steps for gap in gaps[-1:])


@given(schedules())
@example(Schedule(fragments=3, inner_steps=3, overlap_steps=3, steps=7))
def test_every_round_is_applied_once_in_order_and_tau_steps_later(schedule):
    in_flight: dict[int, tuple[Due, int]] = {}
    applied: dict[int, list[int]] = {f: [] for f in range(schedule.fragments)}

    def apply(due: Due, now: int) -> None:
        sent, at = in_flight.pop(due.fragment)
        assert sent == due
        assert now == min(at + schedule.overlap_steps, schedule.steps)
        applied[due.fragment].append(due.round)

    for step in range(1, schedule.steps + 1):
        for due in applies(schedule, step):
            apply(due, step)
        sent = schedule.sends(step)
        for due in sent:
            assert due.fragment not in in_flight, "two rounds of one fragment in flight"
            assert schedule.send_step(due) == step
            in_flight[due.fragment] = due, step
        if schedule.applies_at_once(step):
            for due in sent:
                apply(due, step)
    assert not in_flight
    for fragment, rounds in applied.items():
        assert rounds == list(range(schedule.rounds(fragment)))


def test_two_fragments_with_overlap_by_hand():
    schedule = plan(fragments=2, overlap_steps=1, steps=10)
    sent = [schedule.sends(step) for step in range(1, 11)]
    first = [(), (Due(0, 0),), (), (Due(1, 0),), (), (Due(0, 1),), (), (Due(1, 1),), ()]
    assert sent == [*first, (Due(0, 2), Due(1, 2))]
    applied = [applies(schedule, step) for step in range(1, 11)]
    assert applied == [(), *first]  # what the last step sends is applied at once


def test_the_last_step_applies_what_is_in_flight_oldest_first():
    schedule = plan(fragments=4, overlap_steps=3, steps=7)
    assert applies(schedule, 7) == (Due(3, 0), Due(0, 1), Due(1, 1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inner_steps": 0}, r"^inner_steps \(H\) is 0; it must be at least 1$"),
        ({"inner_steps": -3}, r"^inner_steps \(H\) is -3; it must be at least 1$"),
        ({"fragments": 5}, r"^5 fragments do not fit into inner_steps = 4; use fewer"),
        ({"fragments": 0}, r"^0 fragments do not fit"),
        ({"overlap_steps": 5}, r"^overlap_steps \(tau\) is 5; it must be 0 to inner_steps = 4$"),
        ({"overlap_steps": -1}, r"^overlap_steps \(tau\) is -1"),
        ({"steps": 0}, r"^steps is 0; it must be at least 1$"),
    ],
)
def test_impossible_schedules_are_refused_with_the_value(changes, message):
    with pytest.raises(ValueError, match=message):
        plan(**changes)


def test_fragments_that_are_due_together_may_be_more_than_the_period_has_steps():
    schedule = Schedule(fragments=3, inner_steps=2, overlap_steps=0, steps=5, together=True)
    sent = {step: [due.fragment for due in schedule.sends(step)] for step in range(1, 6)}
    assert sent == {1: [], 2: [0, 1, 2], 3: [], 4: [0, 1, 2], 5: [0, 1, 2]}
