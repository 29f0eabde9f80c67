"""View: who is worth sending to, who is waited for, who lays out the next round, who is cut off."""

from dataclasses import replace

import pytest

from murmuration.worker.exchange.round_context import RoundConfig
from murmuration.worker.exchange.view import View, reached_by_all
from murmuration.worker.membership import Phase
from tests.protocol.views import member, view


def test_who_has_ended_the_run_holds_none_of_the_rounds_before_its_last():
    """It has applied its last round, so it is at the next; others may still be in it."""
    done = View({"d": member("d", phase=Phase.DONE, versions=(9, 4))})
    trains = View({"d": member("d", versions=(9, 4))})
    for round_, ended in ((2, True), (3, False), (4, False)):
        assert done.has_ended_before("d", 1, round_) is ended
        assert not trains.has_ended_before("d", 1, round_)
        assert not done.has_ended_before("nobody", 1, round_)


def test_settings_that_cannot_work_are_refused():
    wrong = [("quorum", 0.0), ("quorum", 1.1), ("grace_s", 0.0), ("floor_mbps", -1.0)]
    for name, value in [*wrong, ("retry_s", 0.0)]:
        with pytest.raises(ValueError, match=name):
            RoundConfig(**{name: value})


def test_a_shard_goes_to_a_peer_that_everybody_reaches():
    for seen, reducer in [
        (view("abcd"), "d"),
        (view("abc", suspect="d"), "a"),
        (view("abc", dead="d"), "a"),
        (view("abcd", unreachable="da"), "b"),
        (view("abd", suspect="c", unreachable="da"), "b"),
        (view("bcd", dead="a", unreachable="da"), "d"),  # no matter: a cut to the dead
        (view("abcdx", unreachable="dx"), "d"),  # nor one to a peer that is not in the round
        (view("ad", dead="bc", unreachable="ad"), "a"),  # of two the one that is reached
        (view("yx", dead="abcd"), "x"),  # where all are gone, a peer outside
        (view("x", dead="abc", suspect="d"), None),  # not while one is suspected
        (view("", dead="abcd"), None),
    ]:
        assert seen.reducer("dabc") == reducer


def marked(**unreachable: str) -> View:
    """Peers a to d that train; each does not reach those named, letter by letter."""
    return View({p: replace(member(p), unreachable=tuple(unreachable.get(p, ""))) for p in "abcd"})


def test_who_most_of_the_others_do_not_reach_is_cut_off():
    for unreachable, cut_off in [
        ({}, ""),
        ({"a": "d"}, ""),
        ({"a": "b", "b": "a"}, ""),
        ({"a": "d", "b": "d"}, "d"),
        ({"a": "d", "b": "d", "c": "d"}, "d"),
        ({"a": "d", "b": "d", "d": "ab"}, "d"),
    ]:
        assert marked(**unreachable).cut_off == frozenset(cut_off)


def test_up_to_half_of_the_peers_are_believed_that_they_do_not_keep_up():
    for late, found in [("", ""), ("d", "d"), ("cd", "cd"), ("bcd", "")]:
        told = marked().members.items()
        seen = View({p: replace(each, idle=(p,) if p in late else ()) for p, each in told})
        assert seen.late == seen.cut_off == frozenset(found)
        assert {peer for peer in "abcd" if seen.will_contribute(peer, 0, 0)} == {*"abcd"} - {*found}
        assert seen.joinable() == frozenset("abcd"), late
        assert seen.reducer("dcba") == max({*"abcd"} - {*found})


def test_a_late_peer_goes_on_where_the_only_other_is_waited_for_in_vain():
    """It reduces for itself then: else it would ask the other for ever."""
    late = replace(member("a"), idle=("a", "b"))
    seen = View({"a": late, "b": replace(member("b"), phase=Phase.DONE)})
    assert (seen.late, seen.cut_off) == ({"a"}, {"b"})
    assert seen.reducer(["b", "a"]) == "a"


def test_what_the_ended_say_does_not_count_nor_what_those_say_that_never_contributed():
    members = marked(a="d", b="d", c="d").members
    assert View(members).reducer("d") == "a"  # for a group that is cut off another stands in
    assert View(members, contributors=frozenset("cdx")).cut_off == frozenset("d")
    assert View(members, contributors=frozenset("d")).cut_off == frozenset()
    ended = {peer: replace(members[peer], phase=Phase.DONE) for peer in "ab"}
    quiet = replace(members["c"], unreachable=())
    assert View({**members, **ended, "c": quiet}).cut_off == frozenset()
    over = {peer: replace(each, phase=Phase.DONE) for peer, each in members.items()}
    assert View(over).cut_off == frozenset("d")


@pytest.mark.parametrize(
    ("group", "unreachable", "reached"),
    [
        ("abcd", "", "abcd"),
        ("abcd", "ab", "cd"),
        ("abc", "ab", "c"),
        ("ab", "ab", "ab"),
        ("abcd", "ab cd", "abcd"),
        ("abcdef", "ab cd", "ef"),
        ("abcdef", "ab ac ad", "ef"),
        ("abcdef", "ab ac ad ae", "bcdef"),
        ("abcdef", "ab ac ad ae ef", "bcd"),
        ("abcd", "ax bx", "abcd"),
    ],
)
def test_reached_by_all(group, unreachable, reached):
    """At least a third of the group: one that hardly anybody reaches does not count."""
    pairs = {(one, other) for one, other in unreachable.split()}
    assert reached_by_all(group, pairs) == set(reached)
