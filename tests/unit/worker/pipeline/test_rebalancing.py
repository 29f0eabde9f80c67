"""Which stage is orphaned and the one peer that moves there, by its links or else by name; and the
stage that a newcomer serves."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations

import pytest

from algorithms.presets import PRESETS
from tests.support.memory_transport import MemoryNetwork, MemoryTransport
from tests.unit.worker.pipeline.members import members_of, telling
from worker import wire
from worker.membership import Health, Member, Phase
from worker.pipeline.config import StagesConfig
from worker.pipeline.profile import Profile
from worker.pipeline.rebalancing import (
    Rebalancer,
    StageAssignment,
    StageExchange,
    members_at,
    slowest_stage,
)
from worker.training.inbox import StageMove
from worker.transport import Caller, Stream

STAGES = 3
EXCHANGE = StageExchange(message_bytes=1000, every_iterations=10, microbatches=4)


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
        rebalancer = Rebalancer(each.peer, STAGES, EXCHANGE)
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


def test_nobody_leaves_a_stage_orphaned_to_serve_another() -> None:
    assert movers([member("0a"), member("1a", Health.DEAD), member("2a")], 0.0, 10.0) == {}


def test_stage_0_is_not_made_anew() -> None:
    assert (
        movers([member("0a", Health.DEAD), member("1a"), member("2a"), member("2b")], 0.0, 10.0)
        == {}
    )


def test_a_replica_of_another_stage_goes_before_one_of_stage_0() -> None:
    members = [member("0a"), member("0b"), member("1a", Health.DEAD), member("2a"), member("2b")]
    assert movers(members, 0.0, 2.0).keys() == {"2b"}
    assert movers(members[:-1], 0.0, 2.0).keys() == {"0b"}


def test_two_orphaned_stages_get_one_peer_each() -> None:
    members = [
        member("0a"),
        member("0b"),
        member("0c"),
        member("1a", Health.DEAD),
        member("2a", Health.DEAD),
    ]
    assert movers(members, 0.0, 2.0) == {
        "0c": StageMove(1, orphaned=True),
        "0b": StageMove(2, orphaned=True),
    }


def test_a_stage_that_is_served_in_between_is_orphaned_again() -> None:
    served = [member("0a"), member("1a"), member("2a"), member("2b")]
    orphaned = [served[0], member("1a", Health.DEAD), *served[2:]]
    rebalancer = Rebalancer("2b", STAGES, EXCHANGE)
    assert rebalancer.tick(orphaned, 0.0) is None
    assert rebalancer.tick(served, 1.0) is None
    assert rebalancer.tick(orphaned, 2.0) is None
    assert rebalancer.tick(orphaned, 4.0) == StageMove(1, orphaned=True)


def test_who_does_not_go_in_its_turn_is_passed_over_for_another() -> None:
    members = [member("0a"), member("0b"), member("1a", Health.DEAD), member("2a"), member("2b")]
    rebalancer = Rebalancer("0b", STAGES, EXCHANGE)
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


def near(member: Member, peers: str) -> Member:
    """With links of 1 MB/s: 1 ms to these peers, 0.5 s to all others."""
    names = ["0a", "2a", "2b", "2c"]
    profile = Profile(
        latency_s={name: 0.001 if name in peers else 0.5 for name in names},
        rate_bytes_per_s=dict.fromkeys(names, 1e6),
    )
    return replace(member, profile=profile.pack())


def test_who_is_to_move_is_so_by_two_choices() -> None:
    """The second look waits until gossip has told everyone; news in between begin it again."""
    rest = [member("0a"), member("1a", Health.DEAD), member("2c")]
    first = [*rest, near(member("2a"), "0a"), near(member("2b"), "")]
    later = [*rest, near(member("2a"), ""), near(member("2b"), "0a")]
    rebalancer = Rebalancer("2b", STAGES, EXCHANGE)
    assert rebalancer.tick(first, 0.0) is None  # it is 2a's turn
    assert rebalancer.tick(later, 1.0) is None
    assert rebalancer.tick(later, 2.5) is None  # from here on it is this peer's
    assert rebalancer.tick(later, 4.4) is None
    assert rebalancer.tick(later, 4.5) == StageMove(1, orphaned=True)
    assert {peer: to.stage for peer, to in movers(first, 0.0, 2.0).items()} == {"2a": 1}


# ---------------------------------------------------------------------------------- who it is


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
def test_an_orphaned_stage_gets_the_peer_with_the_best_links(
    near: tuple[int, int], mover: str
) -> None:
    """Stage 1 is orphaned; peers 1 to 3 serve stage 2, which is not next to stage 0."""
    members = linked(members_of(0, 2, 2, 2, 3), [near])
    assert StageAssignment(members, 4, LITTLE).movers_to([1]) == {1: mover}


def test_the_same_members_in_any_order_give_the_same_mover() -> None:
    members = linked(members_of(0, 2, 2, 3), [(0, 1)])
    found = [StageAssignment(order, 4, LITTLE).movers_to([1]) for order in permutations(members)]
    assert found == [{1: "p1"}] * 24


def test_where_too_little_is_measured_the_last_by_name_moves() -> None:
    members = linked(members_of(0, 2, 2, 2, 3), [(0, 1)])
    assert StageAssignment(members, 4, LITTLE).movers_to([1]) == {1: "p1"}
    few = [*members[:1], *members_of(0, 2, 2, 2, 3)[1:]]  # 4 of 10 links
    assert StageAssignment(few, 4, LITTLE).movers_to([1]) == {1: "p3"}


def test_between_near_peers_the_last_by_name_moves_whatever_was_measured() -> None:
    """All on one machine: a millisecond or two, by chance."""
    members = members_of(0, 2, 2, 2, 3)
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
        assert StageAssignment(measured, 4, LITTLE).movers_to([1]) == {1: "p3"}


def test_the_stage_with_the_most_replicas_gives_one_up_whatever_the_links() -> None:
    members = linked(members_of(0, 2, 2, 3, 3, 3), [(0, 1), (0, 2)])
    assert StageAssignment(members, 4, LITTLE).movers_to([1]).keys() == {1}
    assert StageAssignment(members, 4, LITTLE).movers_to([1])[1] in {"p3", "p4", "p5"}


def test_a_second_orphaned_stage_gets_another_peer_as_long_as_one_can_be_spared() -> None:
    members = linked(members_of(0, 3, 3, 3), [(0, 3)])
    assert StageAssignment(members, 4, LITTLE).movers_to([1, 2]) == {1: "p3", 2: "p2"}
    assert StageAssignment(members[:3], 4, LITTLE).movers_to([1, 2]) == {1: "p2"}
    assert StageAssignment(members[:2], 4, LITTLE).movers_to([1, 2]) == {}


def test_a_slow_stage_gets_of_those_that_help_enough_the_one_near_to_its_replicas() -> None:
    visits_s = {1: 0.8, 2: 0.1, 3: 0.1, 4: 0.1}
    for near, mover in (((1, 2), "p2"), ((1, 3), "p3"), ((1, 4), "p4")):
        members = linked(members_of(0, 1, 2, 2, 2), [near], visits_s)
        assert StageAssignment(members, 3, MUCH).mover_to_slowest() == (mover, 1)


def test_who_is_too_slow_to_help_does_not_go_however_near_it_is() -> None:
    visits_s = {1: 0.8, 2: 9.0, 3: 0.1, 4: 0.1}
    members = linked(members_of(0, 1, 2, 2, 2), [(1, 2)], visits_s)
    found = StageAssignment(members, 3, MUCH).mover_to_slowest()
    assert found is not None
    assert found[0] in {"p3", "p4"}


def test_nobody_moves_between_stages_that_are_about_equal() -> None:
    assert (
        StageAssignment(linked(members_of(0, 1, 1, 2, 2), []), 3, MUCH).mover_to_slowest() is None
    )


def test_an_exchange_is_that_of_a_stage_of_the_mean_size() -> None:
    stages = StagesConfig(count=4, microbatches=6)
    found = StageExchange.of(PRESETS["diloco"], stages, 4000)
    expected = StageExchange(
        message_bytes=4000, every_iterations=PRESETS["diloco"].inner_steps, microbatches=6
    )
    assert found == expected
    assert StageExchange.of(PRESETS["local"], stages, 4000).message_bytes == 0


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
