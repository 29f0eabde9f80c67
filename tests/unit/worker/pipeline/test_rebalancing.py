"""Which stage is orphaned, which one peer moves there, and the stage that a newcomer serves."""

import pytest

from murmuration.worker.membership import Health, Member, Phase
from murmuration.worker.pipeline import rebalancing
from murmuration.worker.pipeline.profile import Profile
from murmuration.worker.pipeline.stages_config import StagesConfig
from murmuration.worker.training.mailbox import StageMove
from tests.unit.worker.pipeline.members import members_of, telling

STAGES = 3


def member(peer: str, health: Health = Health.ALIVE, visit_s: float = 0.0) -> Member:
    """A member of the stage that the name begins with."""
    made = Member(peer, peer, 1, stage=int(peer[0]), health=health, phase=Phase.TRAINING)
    return telling(made, Profile(forward_s=visit_s / 2, backward_s=visit_s / 2))


def movers(members: list[Member], *times: float) -> dict[str, StageMove]:
    """Who moves where, when all have looked at these times."""
    found: dict[str, StageMove] = {}
    for each in members:
        rebalancer = rebalancing.Rebalancer(each.peer, STAGES)
        for now in times:
            if each.live and (to := rebalancer.tick(members, now)) is not None:
                found[each.peer] = to
    return found


def test_who_does_not_go_in_its_turn_is_passed_over_for_another():
    members = [member("0a"), member("0b"), member("1a", Health.DEAD), member("2a"), member("2b")]
    rebalancer = rebalancing.Rebalancer("0b", STAGES)
    assert rebalancer.tick(members, 0.0) is None
    frozen = [*members[:-1], member("2b", Health.DEAD)]
    assert rebalancer.tick(frozen, 10.0) is None
    assert rebalancer.tick(frozen, 20.5) is None
    assert rebalancer.tick(frozen, 23.0) == StageMove(1, orphaned=True)


def test_one_peer_leaves_a_fast_stage_for_a_slow_one():
    numbered = [member(peer, visit_s=0.1) for peer in ("2a", "2b", "2c")]
    members = [member("0a"), member("1a", visit_s=0.4), *numbered]
    assert movers(members, 0.0, 19.0) == {}
    assert list(movers(members, 0.0, 20.0).values()) == [StageMove(1, orphaned=False)]
    assert movers([*members[:-1], member("2c", Health.SUSPECT, visit_s=0.1)], 0.0, 20.0) == {}


def members_at_speed(visit_s: dict[int, float], *stages: int) -> list[Member]:
    """Members of these stages; by number, what a visit takes (0.2 s)."""
    times = [visit_s.get(n, 0.2) / 2 for n in range(len(stages))]
    told = [Profile(forward_s=half_s, backward_s=half_s) for half_s in times]
    return list(map(telling, members_of(*stages), told))


def test_a_second_orphaned_stage_gets_another_peer_as_long_as_one_can_be_spared():
    members = members_of(0, 3, 3, 3)
    assert rebalancing.movers_to([1, 2], members) == {1: "p3", 2: "p2"}
    assert rebalancing.movers_to([1, 2], members[:3]) == {1: "p2"}
    assert rebalancing.movers_to([1, 2], members[:2]) == {}


@pytest.mark.parametrize(
    ("visit_s", "stages", "moves"),
    [
        pytest.param({}, (1, 1, 1, 2), ("p2", 2), id="the other is the slowest"),
        pytest.param({1: 2.0}, (1, 2), None, id="it is the last of its stage"),
        pytest.param({2: 0.07}, (1, 1, 2), None, id="its own is the slowest"),
        pytest.param({}, (1, 1, 2), None, id="less than a factor of 1.2"),
        pytest.param(
            {1: 0.8, 2: 0.1, 3: 0.1, 4: 9.0},
            (0, 1, 2, 2, 2),
            ("p3", 1),
            id="one is too slow to help",
        ),
    ],
)
def test_a_peer_moves_for_a_real_gain_and_never_orphans_a_stage(visit_s, stages, moves):
    assert rebalancing.mover_to_slowest(members_at_speed(visit_s, *stages), 3) == moves


def test_what_is_no_member_of_a_stage_is_passed_over():
    known = {"health": "alive", "visits_per_s": None}
    odd = [*({"stage": stage, **known} for stage in (0, None, "1", 7, -1)), "x", {"stage": 1}]
    assert rebalancing.slowest_stage(odd, StagesConfig(count=2)) == 1
