"""Which stage is bare, and the one peer that moves there."""

from dataclasses import replace

import pytest

from worker.membership import Health, Member, Phase
from worker.pipeline.moving import Moved, Moving
from worker.pipeline.profile import Profile
from worker.pipeline.rebalancing import StageExchange

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


def movers(members: list[Member], *times: float) -> dict[str, Moved]:
    """Who moves where, when all have looked at these times."""
    found: dict[str, Moved] = {}
    for each in members:
        moving = Moving(each.peer, STAGES, EXCHANGE)
        for now in times:
            if each.live and (to := moving.look(members, now)) is not None:
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
def test_one_peer_moves_to_a_bare_stage_once_it_has_been_so_for_a_while(gone: Member) -> None:
    members = [member("0a"), gone, member("2a"), member("2b")]
    assert movers(members, 0.0, 1.9) == {}
    assert movers(members, 0.0, 2.0) == {"2b": Moved(1, bare=True)}


def test_a_stage_that_has_ended_its_run_is_not_bare() -> None:
    members = [member("0a"), member("1a", Health.LEFT, Phase.DONE), member("2a"), member("2b")]
    assert movers(members, 0.0, 10.0) == {}


def test_a_stage_whose_replica_is_only_suspected_is_not_bare() -> None:
    members = [member("0a"), member("1a", Health.SUSPECT), member("2a"), member("2b")]
    assert movers(members, 0.0, 10.0) == {}


def test_nobody_leaves_a_stage_bare_to_serve_another() -> None:
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


def test_two_bare_stages_get_one_peer_each() -> None:
    members = [
        member("0a"),
        member("0b"),
        member("0c"),
        member("1a", Health.DEAD),
        member("2a", Health.DEAD),
    ]
    assert movers(members, 0.0, 2.0) == {"0c": Moved(1, bare=True), "0b": Moved(2, bare=True)}


def test_a_stage_that_is_served_in_between_is_bare_anew() -> None:
    served = [member("0a"), member("1a"), member("2a"), member("2b")]
    bare = [served[0], member("1a", Health.DEAD), *served[2:]]
    moving = Moving("2b", STAGES, EXCHANGE)
    assert moving.look(bare, 0.0) is None
    assert moving.look(served, 1.0) is None
    assert moving.look(bare, 2.0) is None
    assert moving.look(bare, 4.0) == Moved(1, bare=True)


def test_who_does_not_go_in_its_turn_is_passed_over_for_another() -> None:
    members = [member("0a"), member("0b"), member("1a", Health.DEAD), member("2a"), member("2b")]
    moving = Moving("0b", STAGES, EXCHANGE)
    assert moving.look(members, 0.0) is None
    frozen = [*members[:-1], member("2b", Health.DEAD)]
    assert moving.look(frozen, 10.0) is None
    assert moving.look(frozen, 20.5) is None
    assert moving.look(frozen, 23.0) == Moved(1, bare=True)


def test_one_peer_leaves_a_fast_stage_for_a_slow_one() -> None:
    numbered = [member(peer, visit_s=0.1) for peer in ("2a", "2b", "2c")]
    members = [member("0a"), member("1a", visit_s=0.4), *numbered]
    assert movers(members, 0.0, 19.0) == {}
    found = movers(members, 0.0, 20.0)
    assert list(found.values()) == [Moved(1, bare=False)]
    assert movers([*members[:-1], member("2c", Health.SUSPECT, visit_s=0.1)], 0.0, 20.0) == {}


def near(member: Member, peers: str) -> Member:
    """With links of 1 MB/s: 1 ms to these peers, 0.5 s to all others."""
    names = ["0a", "2a", "2b", "2c"]
    profile = Profile(
        latency_s={name: 0.001 if name in peers else 0.5 for name in names},
        rate_bytes_per_s=dict.fromkeys(names, 1e6),
    )
    return replace(member, profile=profile.pack())


def test_who_is_to_move_is_so_by_two_looks() -> None:
    """The second look waits until gossip has told everyone; news in between begin it again."""
    rest = [member("0a"), member("1a", Health.DEAD), member("2c")]
    first = [*rest, near(member("2a"), "0a"), near(member("2b"), "")]
    later = [*rest, near(member("2a"), ""), near(member("2b"), "0a")]
    moving = Moving("2b", STAGES, EXCHANGE)
    assert moving.look(first, 0.0) is None  # it is 2a's turn
    assert moving.look(later, 1.0) is None
    assert moving.look(later, 2.5) is None  # from here on it is this peer's
    assert moving.look(later, 4.4) is None
    assert moving.look(later, 4.5) == Moved(1, bare=True)
    assert {peer: to.stage for peer, to in movers(first, 0.0, 2.0).items()} == {"2a": 1}
