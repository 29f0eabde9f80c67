"""View: who is worth sending to, who is waited for, who lays out the next round, who is cut off."""

from dataclasses import replace

import pytest

from murmuration.worker.exchange.round_context import RoundConfig
from murmuration.worker.exchange.view import View
from murmuration.worker.membership import Phase
from tests.protocol.views import member, view


@pytest.mark.parametrize(
    ("round_", "ended"), [(2, True), (3, False), (4, False)], ids=["before", "its last", "later"]
)
def test_who_has_ended_the_run_holds_none_of_the_rounds_before_its_last(
    round_: int, ended: bool
) -> None:
    """It has applied its last round, so it is at the next; others may still be in it."""
    done = View({"d": member("d", phase=Phase.DONE, versions=(9, 4))})
    assert done.has_ended_before("d", 1, round_) is ended
    trains = View({"d": member("d", versions=(9, 4))})
    assert not trains.has_ended_before("d", 1, round_)
    assert not done.has_ended_before("nobody", 1, round_)


@pytest.mark.parametrize(
    "wrong",
    [{"quorum": 0.0}, {"quorum": 1.1}, {"grace_s": 0.0}, {"floor_mbps": -1.0}, {"retry_s": 0.0}],
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, float]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=name):
        RoundConfig(**wrong)


@pytest.mark.parametrize(
    ("seen", "reducer"),
    [
        pytest.param(view("abcd"), "d", id="all"),
        pytest.param(view("abc", suspect="d"), "a", id="not the suspect"),
        pytest.param(view("abc", dead="d"), "a", id="not the dead"),
        pytest.param(view("abcd", unreachable="da"), "b", id="not who is cut off from another"),
        pytest.param(view("abd", suspect="c", unreachable="da"), "b", id="nor the suspect besides"),
        pytest.param(
            view("bcd", dead="a", unreachable="da"), "d", id="no matter: a cut to the dead"
        ),
        pytest.param(view("abcdx", unreachable="dx"), "d", id="nor one to who is not in the round"),
        pytest.param(view("ad", dead="bc", unreachable="ad"), "a", id="of two the one reached"),
        pytest.param(view("yx", dead="abcd"), "x", id="where all are gone, a peer outside"),
        pytest.param(view("x", dead="abc", suspect="d"), None, id="not while one is suspected"),
        pytest.param(view("", dead="abcd"), None, id="nobody"),
    ],
)
def test_a_shard_goes_to_a_peer_that_everybody_reaches(seen: View, reducer: str | None) -> None:
    assert seen.reducer("dabc") == reducer


# --------------------------------------------------------------- whom others do not reach


def marked(**unreachable: str) -> View:
    """Peers a to d that train; each does not reach those named, letter by letter."""
    return View({p: replace(member(p), unreachable=tuple(unreachable.get(p, ""))) for p in "abcd"})


@pytest.mark.parametrize(
    ("unreachable", "cut_off"),
    [
        ({}, ""),
        ({"a": "d"}, ""),
        ({"a": "b", "b": "a"}, ""),
        ({"a": "d", "b": "d"}, "d"),
        ({"a": "d", "b": "d", "c": "d"}, "d"),
        ({"a": "d", "b": "d", "d": "ab"}, "d"),
    ],
)
def test_who_most_of_the_others_do_not_reach_is_cut_off(
    unreachable: dict[str, str], cut_off: str
) -> None:
    assert marked(**unreachable).cut_off == frozenset(cut_off)


@pytest.mark.parametrize(("late", "found"), [("", ""), ("d", "d"), ("cd", "cd"), ("bcd", "")])
def test_up_to_half_of_the_peers_are_believed_that_they_do_not_keep_up(
    late: str, found: str
) -> None:
    members = {
        peer: replace(member, idle=(peer,) if peer in late else ())
        for peer, member in marked().members.items()
    }
    seen = View(members)
    assert seen.late == seen.cut_off == frozenset(found)
    assert {peer for peer in "abcd" if seen.will_contribute(peer, 0, 0)} == {*"abcd"} - {*found}
    assert seen.joinable() == frozenset("abcd")
    assert seen.reducer("dcba") == max({*"abcd"} - {*found})


def test_a_late_peer_goes_on_where_the_only_other_is_waited_for_in_vain() -> None:
    """It reduces for itself then: else it would ask the other for ever."""
    late = replace(member("a"), idle=("a", "b"))
    seen = View({"a": late, "b": replace(member("b"), phase=Phase.DONE)})
    assert (seen.late, seen.cut_off) == ({"a"}, {"b"})
    assert seen.reducer(["b", "a"]) == "a"


def test_for_a_group_that_is_cut_off_another_stands_in() -> None:
    assert marked(a="d", b="d", c="d").reducer("d") == "a"


def test_what_the_ended_say_does_not_count_nor_what_those_say_that_never_contributed() -> None:
    members = marked(a="d", b="d", c="d").members
    assert View(members, contributors=frozenset("cdx")).cut_off == frozenset("d")
    assert View(members, contributors=frozenset("d")).cut_off == frozenset()
    ended = {peer: replace(members[peer], phase=Phase.DONE) for peer in "ab"}
    quiet = replace(members["c"], unreachable=())
    assert View({**members, **ended, "c": quiet}).cut_off == frozenset()
    over = {peer: replace(each, phase=Phase.DONE) for peer, each in members.items()}
    assert View(over).cut_off == frozenset("d")
