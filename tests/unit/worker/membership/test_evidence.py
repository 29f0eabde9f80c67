"""What speaks against a peer: others' word, lost probes, and rounds that waited in vain."""

import pytest

from murmuration.worker.membership import Health, Membership
from murmuration.worker.membership.evidence import IdlePeers, Reachability
from tests.unit.worker.membership.machines import (
    CONFIG,
    SUSPICION_S,
    asked,
    health,
    machine,
    member,
    probes,
    suspect,
    tick_until,
)


def test_a_suspicion_of_a_higher_incarnation_starts_its_time_again() -> None:
    membership = machine("w1", "w2", "w3")
    suspect(membership, "w1", 0.0)
    tick_until(membership, 0.0, 3.0)
    membership.hear((member("w1", incarnation=1, health=Health.SUSPECT),), None, 3.0)
    assert health(membership, "w1") is Health.ALIVE, "it has refuted, and that is all that is known"
    tick_until(membership, 3.1, 5.0)
    suspect(membership, "w1", 5.0)
    tick_until(membership, 5.1, 2.9 + SUSPICION_S)
    assert health(membership, "w1") is Health.SUSPECT
    tick_until(membership, 3.0 + SUSPICION_S, 3.0 + SUSPICION_S)
    assert health(membership, "w1") is Health.DEAD


def test_the_same_suspicion_heard_again_does_not() -> None:
    membership = machine("w1", "w2", "w3")
    suspect(membership, "w1", 0.0)
    for second in range(1, 4):
        membership.hear((member("w1", health=Health.SUSPECT),), None, float(second))
        tick_until(membership, second, second + 0.9)
    tick_until(membership, 4.0, SUSPICION_S)
    assert health(membership, "w1") is Health.DEAD


@pytest.mark.parametrize("word", [Health.SUSPECT, Health.DEAD, Health.LEFT])
def test_what_others_say_of_an_end_makes_this_peer_look_and_no_more(word: Health) -> None:
    membership = machine("w1", "w2", "w3")
    actions = membership.hear((member("w1", health=word),), "w2", 0.0)
    assert probes(actions) == ["w1"]
    assert not membership.changed
    assert membership.said_against("w1") == member("w1", health=Health.SUSPECT)
    assert membership.probed("w1", 0.1, answered=True) == []
    assert membership.said_against("w1") is None
    again = membership.hear((member("w1", health=word),), "w3", 0.2)
    assert again == [], "it has only just answered"
    tick_until(membership, 0.3, 3 * SUSPICION_S)
    assert health(membership, "w1") is Health.ALIVE


def test_a_departure_that_others_tell_of_is_one_when_the_peer_is_silent() -> None:
    membership = machine("w1", "w2", "w3")
    membership.hear((member("w1", health=Health.LEFT),), "w2", 0.0)
    for _ in asked(membership.probed("w1", 1.0, answered=False)):
        membership.probed_for("w1", 2.0, alive=False)
    assert health(membership, "w1") is Health.LEFT


def test_several_that_say_the_same_shorten_the_time_of_a_suspect() -> None:
    """Down to what ten peers have; the word of one counts once, however often it comes."""
    others = [f"w{n:02}" for n in range(99)]
    for accusers, time_s in ((1, 2.0), (2, 1.5), (4, 1.0), (9, 1.0)):
        membership = machine(*others)
        suspect(membership, "w00", 0.0)
        for accuser in others[1:accusers]:
            for _ in range(3):
                membership.hear((member("w00", health=Health.SUSPECT),), accuser, 0.0)
        until = time_s * CONFIG.least_suspicion_s
        tick_until(membership, 0.1, until - 0.1, silent=["w00"])
        assert health(membership, "w00") is Health.SUSPECT, f"{accusers} accuse"
        tick_until(membership, until, until)
        assert health(membership, "w00") is Health.DEAD, f"{accusers} accuse"


def test_ones_own_starvation_shifts_the_time_of_the_others() -> None:
    membership = machine("w1", "w2", "w3")
    tick_until(membership, 0.0, 1.0)
    suspect(membership, "w1", 1.0)
    membership.tick(61.0)  # frozen for a minute: nobody could have been heard
    assert health(membership, "w1") is Health.SUSPECT
    membership.hear((member("w1", incarnation=1),), None, 61.0)
    tick_until(membership, 61.1, 70.0)
    assert health(membership, "w1") is Health.ALIVE


def missed(reach: Reachability, peer: str, *times: float) -> None:
    for now in times:
        reach.answered_to_others(peer, now)


# --------------------------------------------------------------------------------- the machine


def health_of_all(membership: Membership) -> set[Health]:
    return {each.health for each in membership.members}


def test_an_answer_to_others_that_took_long_says_nothing_of_the_link() -> None:
    """The own link is slow, to whomever it leads."""
    membership = machine("w1", "w2", "w3")
    for begun in range(0, 40, 4):
        for ask in asked(membership.probed("w2", begun, answered=False)):
            late = begun + CONFIG.probe_timeout_s + 0.1
            membership.probed_for(ask.peer, late, alive=True)
    assert membership.me.unreachable == ()
    assert health_of_all(membership) == {Health.ALIVE}


MINUTE_S = 60.0


@pytest.mark.parametrize(
    ("rounds", "marked"),
    [
        (["d", "d"], ()),
        (["d", "d", "d"], ("d",)),
        (["dd", "d"], ("d",)),
        (["d", *[""] * 6, "d", "d"], ()),
        (["d", *[""] * 5, "d", "d"], ("d",)),
        (["d", "c", "d", "c"], ()),
    ],
)
def test_three_of_eight_rounds(rounds: list[str], marked: tuple[str, ...]) -> None:
    idle = IdlePeers()
    for late in rounds:
        idle.round_ended(0, list(late), now=0.0)
    assert idle.peers == marked


def test_a_peer_says_for_longer_of_itself_that_it_does_not_keep_up() -> None:
    idle = IdlePeers("d")
    idle.waited_for("d", now=0.0)
    idle.tick(4 * MINUTE_S - 1)
    assert idle.peers == ("d",)
    idle.tick(4 * MINUTE_S)
    assert idle.peers == ()


def test_one_pause_that_many_fragments_meet_marks_nobody() -> None:
    idle = IdlePeers()
    for fragment in range(8):
        idle.round_ended(fragment, ["d"], now=0.0)
    assert idle.peers == ()


def test_who_was_marked_is_waited_for_once_more_and_stays_out_for_twice_as_long() -> None:
    idle = IdlePeers()
    idle.waited_for("d", now=0.0)
    idle.tick(MINUTE_S)
    assert idle.peers == ()
    idle.round_ended(0, ["d"], now=MINUTE_S)
    idle.tick(3 * MINUTE_S - 1)
    assert idle.peers == ("d",)
    idle.tick(3 * MINUTE_S)
    assert idle.peers == ()
