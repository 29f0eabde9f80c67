"""Which stage is orphaned, which one peer moves there, and the stage that a newcomer serves."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations

import pytest

from murmuration.worker import wire
from murmuration.worker.membership import Health, Member, Phase
from murmuration.worker.pipeline.profile import Profile
from murmuration.worker.pipeline.rebalancing import (
    Rebalancer,
    StageAssignment,
    members_at,
    slowest_stage,
    stage_to_move_to,
)
from murmuration.worker.pipeline.stages_config import StagesConfig
from murmuration.worker.training.mailbox import StageMove
from murmuration.worker.transport import Caller, Stream
from tests.support.memory_transport import MemoryNetwork, MemoryTransport
from tests.unit.worker.pipeline.members import members_of, telling

STAGES = 3


@pytest.mark.parametrize(
    ("stages", "to"),
    [
        pytest.param([{1: 1.0, 2: 1.0, 3: 1.0}, {4: 1.0}], 1, id="the other is the slowest"),
        pytest.param([{1: 1.0}, {4: 0.1}], None, id="it is the last of its stage"),
        pytest.param([{1: 1.0, 2: 1.0}, {4: 3.0}], None, id="its own is the slowest"),
        pytest.param([{1: 1.0, 2: 1.0}, {4: 1.0}], None, id="less than a factor of 1.2"),
    ],
)
def test_a_peer_moves_for_a_real_gain_and_never_orphans_a_stage(
    stages: list[dict[int, float]], to: int | None
) -> None:
    assert stage_to_move_to(1, stages) == to


def member(
    peer: str,
    health: Health = Health.ALIVE,
    phase: Phase = Phase.TRAINING,
    visit_s: float = 0.0,
) -> Member:
    """Of the stage that the name begins with."""
    profile = replace(Profile.unpack(b""), forward_s=visit_s / 2, backward_s=visit_s / 2)
    return Member(
        peer, peer, 1, stage=int(peer[0]), health=health, phase=phase, profile=profile.pack()
    )


def movers(members: list[Member], *times: float) -> dict[str, StageMove]:
    """Who moves where, when all have looked at these times."""
    found: dict[str, StageMove] = {}
    for each in members:
        rebalancer = Rebalancer(each.peer, STAGES)
        for now in times:
            if each.live and (to := rebalancer.tick(members, now)) is not None:
                found[each.peer] = to
    return found


@pytest.mark.parametrize(
    "gone",
    [
        member("1a", Health.DEAD),
        member("1a", Health.LEFT),
        member("1a", Health.DEAD, Phase.READY),
    ],
)
def test_one_peer_moves_to_an_orphaned_stage_once_it_has_been_so_for_a_while(gone: Member) -> None:
    members = [member("0a"), gone, member("2a"), member("2b")]
    assert movers(members, 0.0, 1.9) == {}
    assert movers(members, 0.0, 2.0) == {"2b": StageMove(1, orphaned=True)}


def test_a_stage_that_has_ended_its_run_is_not_orphaned() -> None:
    members = [member("0a"), member("1a", Health.LEFT, Phase.DONE), member("2a"), member("2b")]
    assert movers(members, 0.0, 10.0) == {}


def test_a_stage_whose_replica_is_only_suspected_is_not_orphaned() -> None:
    members = [member("0a"), member("1a", Health.SUSPECT), member("2a"), member("2b")]
    assert movers(members, 0.0, 10.0) == {}


def test_stage_0_is_not_made_anew() -> None:
    assert (
        movers([member("0a", Health.DEAD), member("1a"), member("2a"), member("2b")], 0.0, 10.0)
        == {}
    )


def test_a_replica_of_another_stage_goes_before_one_of_stage_0() -> None:
    members = [member("0a"), member("0b"), member("1a", Health.DEAD), member("2a"), member("2b")]
    assert movers(members, 0.0, 2.0).keys() == {"2b"}
    assert movers(members[:-1], 0.0, 2.0).keys() == {"0b"}


def test_a_stage_that_is_served_in_between_is_orphaned_again() -> None:
    served = [member("0a"), member("1a"), member("2a"), member("2b")]
    orphaned = [served[0], member("1a", Health.DEAD), *served[2:]]
    rebalancer = Rebalancer("2b", STAGES)
    assert rebalancer.tick(orphaned, 0.0) is None
    assert rebalancer.tick(served, 1.0) is None
    assert rebalancer.tick(orphaned, 2.0) is None
    assert rebalancer.tick(orphaned, 4.0) == StageMove(1, orphaned=True)


def test_who_does_not_go_in_its_turn_is_passed_over_for_another() -> None:
    members = [member("0a"), member("0b"), member("1a", Health.DEAD), member("2a"), member("2b")]
    rebalancer = Rebalancer("0b", STAGES)
    assert rebalancer.tick(members, 0.0) is None
    frozen = [*members[:-1], member("2b", Health.DEAD)]
    assert rebalancer.tick(frozen, 10.0) is None
    assert rebalancer.tick(frozen, 20.5) is None
    assert rebalancer.tick(frozen, 23.0) == StageMove(1, orphaned=True)


def test_one_peer_leaves_a_fast_stage_for_a_slow_one() -> None:
    numbered = [member(peer, visit_s=0.1) for peer in ("2a", "2b", "2c")]
    members = [member("0a"), member("1a", visit_s=0.4), *numbered]
    assert movers(members, 0.0, 19.0) == {}
    found = movers(members, 0.0, 20.0)
    assert list(found.values()) == [StageMove(1, orphaned=False)]
    assert movers([*members[:-1], member("2c", Health.SUSPECT, visit_s=0.1)], 0.0, 20.0) == {}


# ---------------------------------------------------------------------------------- who it is


def members_at_speed(visit_s: dict[int, float], *stages: int) -> list[Member]:
    """Members of these stages; by number, what a visit takes (0.2 s)."""
    times = [visit_s.get(n, 0.2) / 2 for n in range(len(stages))]
    return [
        telling(member, Profile(forward_s=half_s, backward_s=half_s))
        for member, half_s in zip(members_of(*stages), times, strict=True)
    ]


def test_the_same_members_in_any_order_give_the_same_mover() -> None:
    members = members_of(0, 2, 2, 3)
    found = [StageAssignment(order, 4).movers_to([1]) for order in permutations(members)]
    assert found == [{1: "p2"}] * 24


def test_the_stage_with_the_most_replicas_gives_one_up() -> None:
    members = members_of(0, 2, 2, 3, 3, 3)
    assert StageAssignment(members, 4).movers_to([1]) == {1: "p5"}


def test_a_second_orphaned_stage_gets_another_peer_as_long_as_one_can_be_spared() -> None:
    members = members_of(0, 3, 3, 3)
    assert StageAssignment(members, 4).movers_to([1, 2]) == {1: "p3", 2: "p2"}
    assert StageAssignment(members[:3], 4).movers_to([1, 2]) == {1: "p2"}
    assert StageAssignment(members[:2], 4).movers_to([1, 2]) == {}


def test_a_peer_that_is_too_slow_to_help_does_not_go() -> None:
    visits_s = {1: 0.8, 2: 0.1, 3: 0.1, 4: 9.0}
    members = members_at_speed(visits_s, 0, 1, 2, 2, 2)
    found = StageAssignment(members, 3).mover_to_slowest()
    assert found is not None
    assert found == ("p3", 1)


# --------------------------------------------------------------------------------- a newcomer


THREE = StagesConfig(count=3)


def row(stage: object, health: str = "alive", speed: object = None) -> dict[str, object]:
    return {"stage": stage, "health": health, "visits_per_s": speed}


def test_the_stage_with_the_fewest_live_replicas_and_the_first_of_equals() -> None:
    assert slowest_stage([row(s) for s in (0, 0, 1, 2, 2)], THREE) == 1
    assert slowest_stage([row(s) for s in (0, 1, 2)], THREE) == 0
    assert slowest_stage([], THREE) == 0


def test_the_stage_with_the_least_throughput_where_speeds_are_measured() -> None:
    """Two slow replicas of stage 2 do less than the only one of stage 1."""
    fast = [row(0, speed=9.0), row(1, speed=5.0)]
    assert slowest_stage([*fast, row(2, speed=2.0), row(2, speed=2.0)], THREE) == 2
    assert slowest_stage([*fast, row(2, speed=3.0), row(2, speed=2.5)], THREE) == 1


def test_who_has_not_measured_counts_as_the_median() -> None:
    told = [row(0, speed=4.0), row(1, speed=4.0), row(2, speed=1.0)]
    assert slowest_stage(told, THREE) == 2
    assert slowest_stage([*told, row(2)], THREE) == 0  # 1 and 4


def test_a_stage_that_routes_skip_needs_less() -> None:
    """Three of four stages: stage 0 in every route, the others in two of three."""
    members = [row(0, speed=5.0), *(row(stage, speed=4.0) for stage in (1, 2, 3))]
    assert slowest_stage(members, StagesConfig(count=4)) == 1
    assert slowest_stage(members, StagesConfig(count=4, routing="skip", skip=0.25)) == 0


@pytest.mark.parametrize("speed", [-1.0, 0.0, "fast", None])
def test_nonsense_is_no_speed(speed: object) -> None:
    assert slowest_stage([row(0), row(1, speed=speed), row(2)], THREE) == 0


def test_only_who_is_there_counts() -> None:
    members = [row(0), row(1, "suspect"), row(2, "dead"), row(2, "left")]
    assert slowest_stage(members, THREE) == 2


def test_what_is_no_member_of_a_stage_is_passed_over() -> None:
    odd = [row(0), "x", row(None), row("1"), row(7), row(-1), {"stage": 1}]
    assert slowest_stage(odd, StagesConfig(count=2)) == 1


class Answering:
    """Answers with one status document."""

    def __init__(self, kind: str, members: object) -> None:
        self.document = {"kind": kind, "members": members}

    async def on_call(self, method: str, request: bytes, caller: Caller) -> bytes:
        assert method == "Control/Status"
        return wire.status_reply(self.document)

    async def on_stream(self, method: str, stream: Stream, caller: Caller) -> None:
        raise AssertionError("nobody opens one")


def asked(address: str, answers: dict[str, Answering]) -> Sequence[object]:
    """What a newcomer hears that asks there."""

    async def scenario() -> Sequence[object]:
        network = MemoryNetwork()
        for name, handler in answers.items():
            await MemoryTransport(network, name).listen(handler)
        return await members_at(MemoryTransport(network, "new"), address)

    return asyncio.run(scenario())


def test_a_coordinator_is_asked_for_a_peer_that_has_measured() -> None:
    rows = [{"address": name, **row(0, health)} for name, health in
            (("gone", "lost"), ("cut", "alive"), ("there", "alive"))]  # fmt: skip
    measured = [row(0, speed=2.0)]
    coordinator, peer = Answering("coordinator", rows), Answering("worker", measured)
    assert asked("it", {"it": coordinator, "there": peer}) == measured
    assert asked("there", {"it": coordinator, "there": peer}) == measured
    assert asked("it", {"it": coordinator}) == rows


def test_an_answer_that_is_no_document_has_no_members() -> None:
    assert asked("it", {"it": Answering("coordinator", "many")}) == []
