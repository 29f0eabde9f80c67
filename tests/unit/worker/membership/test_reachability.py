"""Who is out of this peer's reach, and who was only slow."""

import pytest

from murmuration.worker.membership import (
    MAX_UNREACHABLE,
    Health,
    Member,
    Membership,
    ViewChanged,
)
from murmuration.worker.membership.reachability import Reachability
from tests.unit.worker.membership.machines import (
    CONFIG,
    asked,
    health,
    machine,
    member,
    probes,
    suspect,
    tick_until,
)


def missed(reach: Reachability, peer: str, *times: float) -> None:
    for now in times:
        reach.answered_to_others(peer, now)


def test_several_probes_over_a_while_must_fail() -> None:
    reach = Reachability(brief_s=2.0)
    missed(reach, "a", 10.0, 10.1, 10.2, 11.9)
    assert reach.unreachable == ()
    assert reach.in_question == ["a"]
    missed(reach, "a", 12.0)
    assert reach.unreachable == ("a",)
    assert reach.in_question == []


def test_two_failures_are_chance_however_long_the_time_between() -> None:
    reach = Reachability(brief_s=2.0)
    missed(reach, "a", 10.0, 100.0)
    assert reach.unreachable == ()


def test_an_answer_restarts_the_account() -> None:
    reach = Reachability(brief_s=2.0)
    missed(reach, "a", 0.0, 1.0)
    reach.answered("a", 1.5)
    assert reach.in_question == []
    missed(reach, "a", 2.0, 3.0)
    assert reach.unreachable == ()
    missed(reach, "a", 4.0)
    assert reach.unreachable == ("a",)


def test_who_is_unreachable_is_so_until_it_has_answered_for_a_while() -> None:
    reach = Reachability(brief_s=2.0)
    missed(reach, "a", 0.0, 1.0, 2.0)
    assert reach.in_question == []
    reach.answered("a", 10.0)
    assert reach.in_question == ["a"]
    reach.answered("a", 13.9)
    assert reach.unreachable == ("a",)
    missed(reach, "a", 13.95)
    for now in (14.0, 17.9):
        reach.answered("a", now)
        assert reach.unreachable == ("a",)
    reach.answered("a", 18.0)
    assert reach.unreachable == ()


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


def test_two_refutations_are_as_good_as_three_probes_by_others() -> None:
    reach = Reachability(brief_s=2.0)
    reach.refuted("a", 10.0)
    assert reach.unreachable == ()
    reach.refuted("a", 12.0)
    assert reach.unreachable == ("a",)


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


def test_what_was_of_an_earlier_life_is_forgotten() -> None:
    reach = Reachability(brief_s=2.0)
    missed(reach, "a", 0.0, 1.0, 2.0)
    reach.forget("a")
    reach.forget("b")
    assert reach.unreachable == ()
    missed(reach, "a", 3.0, 4.0)
    assert reach.unreachable == ()


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
    changed = membership.probed("w2", now + 4 * CONFIG.probe_timeout_s, answered=True)
    assert ViewChanged() in changed
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


def test_of_two_peers_none_is_unreachable_when_its_own_second_try_succeeds() -> None:
    membership = machine("w1")
    assert tick_with_a_cut(membership, {"w1"}, 0.0, 20.0) == float("inf")


def test_whom_others_do_not_reach_is_news_of_the_swarm() -> None:
    membership = machine("w1", "w2")
    told: Member = member("w1", heartbeat=1, unreachable=("w2",))
    assert ViewChanged() in membership.hear((told,), None, 0.0)
    assert ViewChanged() not in membership.hear((told,), None, 1.0)
