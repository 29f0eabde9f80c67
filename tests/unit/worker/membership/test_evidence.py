"""What speaks against a peer: others' word, lost probes, and rounds that waited in vain."""

import pytest

from murmuration.worker.membership import MAX_UNREACHABLE, Health, Member, Membership
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


def test_a_failed_probe_is_tried_through_others_before_it_means_anything() -> None:
    membership = machine("w1", "w2", "w3", "w4", "w5")
    actions = asked(membership.probed("w1", 0.0, answered=False))
    assert len(actions) == CONFIG.indirect_probes
    assert len({action.via for action in actions}) == CONFIG.indirect_probes
    for action in actions:
        assert action.via in {"at-w2", "at-w3", "at-w4", "at-w5"}
        assert (action.peer, action.address) == ("w1", "at-w1")
    assert health(membership, "w1") is Health.ALIVE


def test_suspicion_takes_every_indirect_probe_to_fail() -> None:
    membership = machine("w1", "w2", "w3", "w4")
    membership.probed("w1", 0.0, answered=False)
    membership.probed_for("w1", 1.0, alive=False)
    membership.probed_for("w1", 1.0, alive=False)
    assert health(membership, "w1") is Health.ALIVE
    membership.probed_for("w1", 1.0, alive=False)
    assert membership.changed
    assert health(membership, "w1") is Health.SUSPECT


def test_a_suspect_dies_when_its_time_is_up_and_not_before() -> None:
    membership = machine("w1", "w2", "w3")
    tick_until(membership, 0.0, 1.0)
    suspect(membership, "w1", 1.0)
    tick_until(membership, 1.1, 0.9 + SUSPICION_S)
    assert health(membership, "w1") is Health.SUSPECT
    tick_until(membership, 1.0 + SUSPICION_S, 1.0 + SUSPICION_S)
    assert health(membership, "w1") is Health.DEAD


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


def missed(reach: Reachability, peer: str, *times: float) -> None:
    for now in times:
        reach.answered_to_others(peer, now)


def test_a_link_that_fails_again_and_again_is_unreachable_for_longer_each_time() -> None:
    reach, now, steady = Reachability(brief_s=2.0), 0.0, []
    for _ in range(7):
        missed(reach, "a", now, now + 1, now + 2)
        assert reach.unreachable == ("a",)
        began = now = now + 10
        while reach.unreachable:
            reach.answered("a", now)
            now += 1
        steady.append(now - 1 - began)
    assert steady == [4, 8, 16, 32, 64, 64, 64]


def test_a_peer_that_refutes_but_answers_no_probe_is_unreachable() -> None:
    membership = machine("a", "b", "c")
    for now, incarnation in ((1.0, 1), (4.0, 2)):
        assert membership.me.unreachable == ()
        suspect(membership, "a", now)
        refutation = member("a", incarnation=incarnation)
        membership.hear((refutation,), "b", now + 1)
    assert membership.me.unreachable == ("a",)
    assert health(membership, "a") is Health.ALIVE


def test_an_answer_after_a_refutation_clears_the_account() -> None:
    membership = machine("a", "b", "c")
    for now, incarnation in ((1.0, 1), (4.0, 2), (7.0, 3)):
        suspect(membership, "a", now)
        membership.hear((member("a", incarnation=incarnation),), "a", now + 1)
        membership.probed("a", now + 2, answered=True)
    assert membership.me.unreachable == ()


def test_no_more_are_named_than_a_member_may_name() -> None:
    reach = Reachability(brief_s=0.0)
    names = [f"w{index:02d}" for index in range(MAX_UNREACHABLE + 5)]
    for name in reversed(names):
        missed(reach, name, 0.0, 1.0, 2.0)
    assert reach.unreachable == tuple(names[:MAX_UNREACHABLE])


# --------------------------------------------------------------------------------- the machine


def tick_with_a_cut(membership: Membership, cut: set[str], start: float, stop: float) -> float:
    """Ticks ten times a second; probes of whom is cut off fail, others reach them. When the first
    of them is named by this peer; infinity if that does not come to pass."""
    for tenth in range(round(10 * start), round(10 * stop) + 1):
        now = tenth / 10
        for peer in probes(membership.tick(now)):
            for ask in asked(membership.probed(peer, now, answered=peer not in cut)):
                membership.probed_for(ask.peer, now, alive=True)
        if membership.me.unreachable:
            return now
    return float("inf")


def health_of_all(membership: Membership) -> set[Health]:
    return {each.health for each in membership.members}


def test_a_cut_link_is_told_of_soon_and_the_peer_behind_it_is_not_suspected() -> None:
    membership = machine("w1", "w2", "w3")
    within_s = CONFIG.probe_s + 3 * CONFIG.probe_timeout_s
    assert tick_with_a_cut(membership, {"w2"}, 0.0, 20.0) <= within_s
    assert membership.me.unreachable == ("w2",)
    assert health_of_all(membership) == {Health.ALIVE}


def test_in_a_large_swarm_it_is_told_of_soon_after_the_first_probe_that_fails() -> None:
    """Though it would be long before the peer's next turn."""
    membership = machine(*(f"w{index:02d}" for index in range(100)))
    membership.tick(0.0)
    for ask in asked(membership.probed("w50", 0.0, answered=False)):
        membership.probed_for(ask.peer, 0.0, alive=True)
    assert tick_with_a_cut(membership, {"w50"}, 0.1, 20.0) <= 3 * CONFIG.probe_timeout_s


def test_a_brief_cut_is_no_news() -> None:
    membership = machine("w1", "w2", "w3")
    before = membership.me
    assert tick_with_a_cut(membership, {"w2"}, 0.0, 1.5) == float("inf")
    assert tick_with_a_cut(membership, set(), 1.6, 10.0) == float("inf")
    assert membership.me == before


def test_it_is_taken_back_when_the_peer_has_answered_for_a_while() -> None:
    membership = machine("w1", "w2", "w3")
    now = tick_with_a_cut(membership, {"w2"}, 0.0, 20.0)
    beat = membership.me.heartbeat
    membership.probed("w2", now, answered=True)
    assert membership.me.unreachable == ("w2",)
    membership.probed("w2", now + 4 * CONFIG.probe_timeout_s, answered=True)
    assert membership.changed
    assert membership.me.unreachable == ()
    assert membership.me.heartbeat == beat + 1


def test_in_a_large_swarm_a_link_that_is_whole_again_is_found_soon() -> None:
    membership = machine(*(f"w{index:02d}" for index in range(100)))
    for now in (0.0, 1.0, 2.0):
        for ask in asked(membership.probed("w50", now, answered=False)):
            membership.probed_for(ask.peer, now, alive=True)
    assert membership.me.unreachable == ("w50",)
    tick_until(membership, 2.1, 2.1 + CONFIG.reconnect_s + 4 * CONFIG.probe_timeout_s + 1)
    assert membership.me.unreachable == ()


def test_an_answer_to_others_that_took_long_says_nothing_of_the_link() -> None:
    """The own link is slow, to whomever it leads."""
    membership = machine("w1", "w2", "w3")
    for begun in range(0, 40, 4):
        for ask in asked(membership.probed("w2", begun, answered=False)):
            late = begun + CONFIG.probe_timeout_s + 0.1
            membership.probed_for(ask.peer, late, alive=True)
    assert membership.me.unreachable == ()
    assert health_of_all(membership) == {Health.ALIVE}


@pytest.mark.parametrize(
    "news",
    [member("w2", health=Health.LEFT), member("w2", epoch=2), member("w2", epoch=2, address="new")],
    ids=["left", "another life", "elsewhere"],
)
def test_who_is_gone_or_another_is_not_out_of_reach(news: Member) -> None:
    membership = machine("w1", "w2", "w3")
    now = tick_with_a_cut(membership, {"w2"}, 0.0, 20.0)
    membership.hear((news,), "w2", now)
    assert membership.me.unreachable == ()


def test_whom_others_do_not_reach_is_news_of_the_swarm() -> None:
    membership = machine("w1", "w2")
    told: Member = member("w1", heartbeat=1, unreachable=("w2",))
    membership.hear((told,), None, 0.0)
    assert membership.changed
    membership.hear((told,), None, 1.0)
    assert not membership.changed


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
