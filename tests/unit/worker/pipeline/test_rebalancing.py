"""Which stage is orphaned, which one peer moves there, and the stage that a newcomer serves."""

import pytest

from murmuration.worker.membership import Health, Member, Phase
from murmuration.worker.pipeline import rebalancing
from murmuration.worker.pipeline.profile import Profile
from murmuration.worker.pipeline.stages_config import StagesConfig
from murmuration.worker.training.mailbox import StageMove
from tests.unit.worker.pipeline.members import members_of, telling

STAGES = 3


def member(peer: str, health: Health = Health.ALIVE) -> Member:
    """A member of the stage that the name begins with."""
    return Member(peer, peer, 1, stage=int(peer[0]), health=health, phase=Phase.TRAINING)


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


def test_one_peer_leaves_a_full_stage_for_another():
    members = [member(peer) for peer in ("0a", "1a", "2a", "2b", "2c")]
    assert movers(members, 0.0, 19.0) == {}
    assert list(movers(members, 0.0, 20.0).values()) == [StageMove(1, orphaned=False)]
    assert movers([*members[:-1], member("2c", Health.SUSPECT)], 0.0, 20.0) == {}


def test_a_second_orphaned_stage_gets_another_peer_as_long_as_one_can_be_spared():
    members = members_of(0, 3, 3, 3)
    assert rebalancing.movers_to([1, 2], members) == {1: "p3", 2: "p2"}
    assert rebalancing.movers_to([1, 2], members[:3]) == {1: "p2"}
    assert rebalancing.movers_to([1, 2], members[:2]) == {}


@pytest.mark.parametrize(
    ("stages", "moves"),
    [
        pytest.param((1, 1, 1, 2), ("p2", 2), id="the other has the fewest"),
        pytest.param((0, 1, 2, 2, 2), ("p4", 1), id="likewise"),
        pytest.param((1, 2), None, id="it is the last of its stage"),
        pytest.param((1, 1, 2), None, id="nobody is left alone with a liar"),
        pytest.param((1,) * 8 + (2,) * 6, None, id="less than a factor of 1.2"),
    ],
)
def test_a_peer_moves_for_a_real_gain_whatever_speed_is_claimed(stages, moves):
    for forward_s in (1e-9, 1.0, 1e9):
        for n, member in enumerate(members := members_of(*stages)):
            claims = telling(member, Profile(forward_s=forward_s, backward_s=forward_s))
            said = [*members[:n], claims, *members[n + 1 :]]
            assert rebalancing.mover_to_fewest(said, 3) == moves


def test_what_is_no_member_of_a_stage_is_passed_over():
    known = {"health": "alive"}
    odd = [*({"stage": stage, **known} for stage in (0, None, "1", 7, -1)), "x", {"stage": 1}]
    assert rebalancing.stage_in_need(odd, StagesConfig(count=2)) == 1
