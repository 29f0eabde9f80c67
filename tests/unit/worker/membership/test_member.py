"""Which of two records of a member is newer, and what a member can truly be."""

from dataclasses import replace
from functools import reduce

import pytest
from hypothesis import given, strategies as st

from murmuration.worker.membership import Digest, Health, Member, MemberLimits, Phase, newest


@st.composite
def members(draw: st.DrawFn) -> Member:
    """Draws one peer, which raises its heartbeat with each change in what it says of itself."""
    start_ms, heartbeat = draw(st.integers(1, 2)), draw(st.integers(0, 3))
    return Member(
        "w0", f"host:{start_ms}", start_ms, draw(st.integers(0, 3)), draw(st.sampled_from(Health)),
        Phase(heartbeat), heartbeat, step=10 * heartbeat, digests=(Digest(heartbeat, 2, 99),),
    )  # fmt: skip


@given(st.lists(members(), min_size=1, max_size=6), st.data())
def test_rumours_give_the_same_member_in_whatever_order_and_number(rumours, data):
    again = data.draw(st.permutations(rumours + rumours[:2]))
    assert reduce(newest, again) == reduce(newest, rumours)


@given(members(), members())
def test_a_later_life_replaces_all(one, other):
    later = replace(other, start_ms=one.start_ms + 1)
    assert newest(one, later) == later


@given(members(), members())
def test_health_goes_by_incarnation_and_the_rest_by_heartbeat(one, other):
    other = replace(other, start_ms=one.start_ms, address=one.address)
    merged = newest(one, other)
    assert merged.incarnation == max(one.incarnation, other.incarnation)
    assert merged.heartbeat == max(one.heartbeat, other.heartbeat)
    assert merged.step == 10 * merged.heartbeat
    if Health.LEFT in (one.health, other.health):
        assert merged.health is Health.LEFT
    elif one.incarnation == other.incarnation:
        assert merged.health is max(one.health, other.health)
    else:
        assert merged.health is max((one, other), key=lambda member: member.incarnation).health


NOW_MS = 1_700_000_000_000
LIMITS = MemberLimits(steps=100, fragments=3, inner_steps=1, stages=4, stage=1)
DIGESTS = (Digest(7, 2, 5),) * 3


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, None),
        ({"digests": ()}, None),  # it has no model yet
        ({"step": 100, "heartbeat": 2**40, "incarnation": 2**20}, None),
        ({"digests": (Digest(102, 2, 5),) * 3}, None),  # with the means at the end
        ({"start_ms": 2 * NOW_MS}, None),  # by a clock that is decades ahead
        ({"stage": 3, "digests": DIGESTS * 2}, None),  # another stage has other fragments
        ({"start_ms": 2**64 - 1}, "start_ms 18446744073709551615, at most"),
        ({"incarnation": 2**32 - 1}, "incarnation"),
        ({"heartbeat": 2**63}, "heartbeat"),
        ({"step": 101}, "step 101 of 100"),
        ({"stage": 4}, "stage 4 of 4"),
        ({"digests": DIGESTS[:2]}, "2 fragments, of 3"),
        ({"stage": 2, "digests": DIGESTS * 400}, "1200 fragments"),
        ({"digests": (Digest(1007, 2, 5),) * 3}, "version 1007 in a run of 100 steps"),
    ],
)
def test_what_cannot_be_is_named(changes, says):
    found = LIMITS.problem(
        Member("w1", "host:1", **{"start_ms": NOW_MS, "stage": 1, "digests": DIGESTS, **changes})
    )
    assert found is None if says is None else says in str(found)
