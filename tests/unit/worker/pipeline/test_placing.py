"""Who moves: the one whose links fit best, where links are measured; the last by name elsewhere."""

from itertools import permutations

import pytest

from algorithms.plan import PRESETS
from tests.unit.worker.pipeline.members import cards_of, telling
from worker.membership import Member
from worker.pipeline.config import StagesConfig
from worker.pipeline.profile import Profile
from worker.pipeline.rebalancing import Rebalancing, StageExchange

LITTLE = StageExchange(message_bytes=100, every_iterations=100, microbatches=4)
MUCH = StageExchange(message_bytes=10_000_000, every_iterations=1, microbatches=4)


def linked(
    members: list[Member], near: list[tuple[int, int]], visit_s: dict[int, float] | None = None
) -> list[Member]:
    """All links are measured: 1 MB/s, 10 MB/s between those that are near."""
    pairs = {frozenset((f"p{one}", f"p{other}")) for one, other in near}
    speeds = visit_s or {}
    return [
        telling(
            member,
            Profile(
                latency_s={other.peer: 0.01 for other in members if other is not member},
                rate_bytes_per_s={
                    other.peer: 1e7 if frozenset((member.peer, other.peer)) in pairs else 1e6
                    for other in members
                    if other is not member
                },
                forward_s=speeds.get(n, 0.2) / 2,
                backward_s=speeds.get(n, 0.2) / 2,
            ),
        )
        for n, member in enumerate(members)
    ]


@pytest.mark.parametrize(("near", "mover"), [((0, 1), "p1"), ((0, 2), "p2"), ((0, 3), "p3")])
def test_a_bare_stage_gets_the_peer_with_the_best_links(near: tuple[int, int], mover: str) -> None:
    """Stage 1 is bare; peers 1 to 3 serve stage 2, which is not next to stage 0."""
    members = linked(cards_of(0, 2, 2, 2, 3), [near])
    assert Rebalancing(members, 4, LITTLE).to_bare([1]) == {1: mover}


def test_the_same_cards_in_any_order_give_the_same_mover() -> None:
    members = linked(cards_of(0, 2, 2, 3), [(0, 1)])
    found = [Rebalancing(order, 4, LITTLE).to_bare([1]) for order in permutations(members)]
    assert found == [{1: "p1"}] * 24


def test_where_too_little_is_measured_the_last_by_name_moves() -> None:
    members = linked(cards_of(0, 2, 2, 2, 3), [(0, 1)])
    assert Rebalancing(members, 4, LITTLE).to_bare([1]) == {1: "p1"}
    few = [*members[:1], *cards_of(0, 2, 2, 2, 3)[1:]]  # 4 of 10 links
    assert Rebalancing(few, 4, LITTLE).to_bare([1]) == {1: "p3"}


def test_between_near_peers_the_last_by_name_moves_whatever_was_measured() -> None:
    """All on one machine: a millisecond or two, by chance."""
    members = cards_of(0, 2, 2, 2, 3)
    for lucky in range(1, 4):
        told = [
            Profile(
                latency_s={
                    c.peer: 0.001 if n == lucky else 0.002 for c in members if c is not member
                },
                rate_bytes_per_s={c.peer: 9e7 if n == lucky else 5e7 for c in members},
            )
            for n, member in enumerate(members)
        ]
        measured = [telling(member, each) for member, each in zip(members, told, strict=True)]
        assert Rebalancing(measured, 4, LITTLE).to_bare([1]) == {1: "p3"}


def test_the_stage_with_the_most_replicas_gives_one_up_whatever_the_links() -> None:
    members = linked(cards_of(0, 2, 2, 3, 3, 3), [(0, 1), (0, 2)])
    assert Rebalancing(members, 4, LITTLE).to_bare([1]).keys() == {1}
    assert Rebalancing(members, 4, LITTLE).to_bare([1])[1] in {"p3", "p4", "p5"}


def test_a_second_bare_stage_gets_another_peer_as_long_as_one_can_be_spared() -> None:
    members = linked(cards_of(0, 3, 3, 3), [(0, 3)])
    assert Rebalancing(members, 4, LITTLE).to_bare([1, 2]) == {1: "p3", 2: "p2"}
    assert Rebalancing(members[:3], 4, LITTLE).to_bare([1, 2]) == {1: "p2"}
    assert Rebalancing(members[:2], 4, LITTLE).to_bare([1, 2]) == {}


def test_a_slow_stage_gets_of_those_that_help_enough_the_one_near_to_its_replicas() -> None:
    visits_s = {1: 0.8, 2: 0.1, 3: 0.1, 4: 0.1}
    for near, mover in (((1, 2), "p2"), ((1, 3), "p3"), ((1, 4), "p4")):
        members = linked(cards_of(0, 1, 2, 2, 2), [near], visits_s)
        assert Rebalancing(members, 3, MUCH).to_slowest() == (mover, 1)


def test_who_is_too_slow_to_help_does_not_go_however_near_it_is() -> None:
    visits_s = {1: 0.8, 2: 9.0, 3: 0.1, 4: 0.1}
    members = linked(cards_of(0, 1, 2, 2, 2), [(1, 2)], visits_s)
    found = Rebalancing(members, 3, MUCH).to_slowest()
    assert found is not None
    assert found[0] in {"p3", "p4"}


def test_nobody_moves_between_stages_that_are_about_equal() -> None:
    assert Rebalancing(linked(cards_of(0, 1, 1, 2, 2), []), 3, MUCH).to_slowest() is None


def test_an_exchange_is_that_of_a_stage_of_the_mean_size() -> None:
    stages = StagesConfig(count=4, microbatches=6)
    found = StageExchange.of(PRESETS["diloco"], stages, 4000)
    expected = StageExchange(
        message_bytes=4000, every_iterations=PRESETS["diloco"].inner_steps, microbatches=6
    )
    assert found == expected
    assert StageExchange.of(PRESETS["local"], stages, 4000).message_bytes == 0
