"""From a probe that fails to a death, and what comes between."""

import pytest

from murmuration.worker.membership import (
    Health,
    ViewChanged,
)
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


def test_a_failed_probe_is_tried_through_others_before_it_means_anything() -> None:
    membership = machine("w1", "w2", "w3", "w4", "w5")
    actions = asked(membership.probed("w1", 0.0, answered=False))
    assert len(actions) == CONFIG.indirect_probes
    assert len({action.via for action in actions}) == CONFIG.indirect_probes
    for action in actions:
        assert action.via in {"at-w2", "at-w3", "at-w4", "at-w5"}
        assert (action.peer, action.address) == ("w1", "at-w1")
    assert health(membership, "w1") is Health.ALIVE


def test_one_indirect_answer_saves() -> None:
    membership = machine("w1", "w2", "w3", "w4")
    assert len(asked(membership.probed("w1", 0.0, answered=False))) == 3
    for alive in (False, True, False):
        membership.probed_for("w1", 1.0, alive=alive)
    assert health(membership, "w1") is Health.ALIVE


def test_suspicion_takes_every_indirect_probe_to_fail() -> None:
    membership = machine("w1", "w2", "w3", "w4")
    membership.probed("w1", 0.0, answered=False)
    membership.probed_for("w1", 1.0, alive=False)
    membership.probed_for("w1", 1.0, alive=False)
    assert health(membership, "w1") is Health.ALIVE
    assert ViewChanged() in membership.probed_for("w1", 1.0, alive=False)
    assert health(membership, "w1") is Health.SUSPECT


def test_of_two_peers_each_tries_once_more_itself() -> None:
    membership = machine("w1")
    (again,) = asked(membership.probed("w1", 0.0, answered=False))
    assert (again.via, again.peer) == ("at-me", "w1")
    membership.probed_for("w1", 1.0, alive=False)
    assert health(membership, "w1") is Health.SUSPECT


def test_an_answered_probe_asks_nobody() -> None:
    assert machine("w1", "w2").probed("w1", 0.0, answered=True) == []


def test_a_late_answer_of_a_helper_that_was_not_asked_does_nothing() -> None:
    membership = machine("w1", "w2")
    assert membership.probed_for("w1", 0.0, alive=False) == []
    assert membership.probed_for("stranger", 0.0, alive=False) == []
    assert membership.probed("stranger", 0.0, answered=False) == []
    assert health(membership, "w1") is Health.ALIVE


def test_a_suspect_dies_when_its_time_is_up_and_not_before() -> None:
    membership = machine("w1", "w2", "w3")
    tick_until(membership, 0.0, 1.0)
    suspect(membership, "w1", 1.0)
    tick_until(membership, 1.1, 0.9 + SUSPICION_S)
    assert health(membership, "w1") is Health.SUSPECT
    tick_until(membership, 1.0 + SUSPICION_S, 1.0 + SUSPICION_S)
    assert health(membership, "w1") is Health.DEAD


def test_a_higher_incarnation_refutes() -> None:
    membership = machine("w1", "w2", "w3")
    suspect(membership, "w1", 0.0)
    membership.hear((member("w1"),), None, 1.0)
    assert health(membership, "w1") is Health.SUSPECT, "the same incarnation is old news"
    membership.hear((member("w1", incarnation=1),), None, 1.0)
    assert health(membership, "w1") is Health.ALIVE
    tick_until(membership, 1.0, 3 * SUSPICION_S)
    assert health(membership, "w1") is Health.ALIVE


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


def test_a_suspect_that_speaks_gets_its_time_again() -> None:
    """It has not heard of the suspicion yet; its answer takes another message."""
    membership = machine("w1", "w2", "w3")
    suspect(membership, "w1", 0.0)
    tick_until(membership, 0.0, 3.0)
    membership.hear((member("w1"),), "w1", 3.0)
    assert health(membership, "w1") is Health.SUSPECT
    tick_until(membership, 3.1, 2.9 + SUSPICION_S)
    assert health(membership, "w1") is Health.SUSPECT
    tick_until(membership, 3.0 + SUSPICION_S, 3.0 + SUSPICION_S)
    assert health(membership, "w1") is Health.DEAD


def test_somebody_else_speaking_of_a_suspect_does_not() -> None:
    membership = machine("w1", "w2", "w3")
    suspect(membership, "w1", 0.0)
    membership.hear((member("w1"), member("w2")), "w2", 3.0)
    tick_until(membership, 3.0, SUSPICION_S)
    assert health(membership, "w1") is Health.DEAD


@pytest.mark.parametrize("word", [Health.SUSPECT, Health.DEAD, Health.LEFT])
def test_what_others_say_of_an_end_makes_this_peer_look_and_no_more(word: Health) -> None:
    membership = machine("w1", "w2", "w3")
    actions = membership.hear((member("w1", health=word),), "w2", 0.0)
    assert probes(actions) == ["w1"]
    assert ViewChanged() not in actions
    assert membership.said_against("w1") == member("w1", health=Health.SUSPECT)
    assert membership.probed("w1", 0.1, answered=True) == []
    assert membership.said_against("w1") is None
    again = membership.hear((member("w1", health=word),), "w3", 0.2)
    assert again == [], "it has only just answered"
    tick_until(membership, 0.3, 3 * SUSPICION_S)
    assert health(membership, "w1") is Health.ALIVE


def test_a_suspect_that_was_heard_of_first_dies_from_then_on() -> None:
    membership = machine("w1", "w2", "w3")
    membership.hear((member("w1", health=Health.SUSPECT),), "w2", 0.0)
    suspect(membership, "w1", 2.0)
    tick_until(membership, 2.1, SUSPICION_S - 0.1)
    assert health(membership, "w1") is Health.SUSPECT
    tick_until(membership, SUSPICION_S, SUSPICION_S)
    assert health(membership, "w1") is Health.DEAD


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


def test_a_new_life_under_suspicion_gets_its_own_time() -> None:
    """What was left of the old life's time must not end the new one."""
    membership = machine("w1", "w2", "w3")
    suspect(membership, "w1", 0.0)
    tick_until(membership, 0.0, SUSPICION_S - 0.2)
    membership.hear((member("w1", epoch=2, health=Health.SUSPECT),), None, SUSPICION_S - 0.1)
    suspect(membership, "w1", SUSPICION_S)
    tick_until(membership, SUSPICION_S, SUSPICION_S + 1.0)
    assert health(membership, "w1") is Health.SUSPECT


def test_ones_own_starvation_shifts_the_time_of_the_others() -> None:
    membership = machine("w1", "w2", "w3")
    tick_until(membership, 0.0, 1.0)
    suspect(membership, "w1", 1.0)
    membership.tick(61.0)  # frozen for a minute: nobody could have been heard
    assert health(membership, "w1") is Health.SUSPECT
    membership.hear((member("w1", incarnation=1),), None, 61.0)
    tick_until(membership, 61.1, 70.0)
    assert health(membership, "w1") is Health.ALIVE


def test_starvation_only_postpones() -> None:
    membership = machine("w1", "w2", "w3")
    tick_until(membership, 0.0, 1.0)
    suspect(membership, "w1", 1.0)
    tick_until(membership, 61.0, 61.0 + SUSPICION_S)
    assert health(membership, "w1") is Health.DEAD
