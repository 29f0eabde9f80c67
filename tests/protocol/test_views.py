"""View: who is worth sending to, who is waited for, who lays out the next round."""

from dataclasses import replace

import pytest

from murmuration.worker.exchange.round_context import RoundConfig
from murmuration.worker.exchange.view import View
from murmuration.worker.membership import Health, Phase
from tests.protocol.views import member, view

SEEN = view("ab", suspect="s", dead="x", left="l", done="d", starting="n", ahead="h")


@pytest.mark.parametrize(
    ("peer", "live", "usable", "contributes"),
    [
        ("a", True, True, True),
        ("s", True, False, True),
        ("x", False, False, False),
        ("l", False, False, False),
        ("d", True, True, False),
        ("n", True, True, False),
        ("h", True, True, False),
        ("nobody", False, False, False),
    ],
)
def test_peers(peer: str, live: bool, usable: bool, contributes: bool) -> None:
    assert SEEN.live(peer) is live
    assert SEEN.usable(peer) is usable
    assert SEEN.will_contribute(peer, 0, 0) is contributes


def test_the_joinable_are_ready_or_train() -> None:
    ready = member("r", phase=Phase.READY)
    members = {**SEEN.members, "r": ready}
    assert View(members).joinable() == frozenset("abshr")


def test_groups_are_drawn_from_who_trains_or_is_about_to_or_has_ended_the_run() -> None:
    members = {**SEEN.members, "r": member("r", phase=Phase.READY)}
    assert View(members).in_draw(0) == frozenset("abdhrs")


def test_who_is_done_without_a_fragment_is_in_no_draw_of_it() -> None:
    assert View({"d": member("d", phase=Phase.DONE, versions=())}).in_draw(0) == frozenset()


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


@pytest.mark.parametrize(("round_", "waited_for"), [(3, False), (4, True), (5, True)])
def test_a_peer_is_waited_for_from_its_version_on(round_: int, waited_for: bool) -> None:
    seen = View({"a": member("a", versions=(9, 4))})
    assert seen.will_contribute("a", 1, round_) is waited_for


def test_a_peer_whose_digests_are_not_known_yet_is_waited_for() -> None:
    seen = View({"a": member("a", versions=())})
    assert seen.will_contribute("a", 0, 0)


def test_a_ready_peer_is_waited_for() -> None:
    seen = View({"a": member("a", phase=Phase.READY)})
    assert seen.will_contribute("a", 0, 0)


def test_a_dead_peer_is_not_waited_for_whatever_its_phase() -> None:
    seen = View({"a": member("a", Health.DEAD, Phase.READY)})
    assert not seen.will_contribute("a", 0, 0)


@pytest.mark.parametrize(
    "wrong",
    [{"quorum": 0.0}, {"quorum": 1.1}, {"grace_s": 0.0}, {"floor_mbps": -1.0}, {"retry_s": 0.0}],
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, float]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=name):
        RoundConfig(**wrong)


def test_the_deadline_of_a_round_covers_all_that_may_happen_in_it() -> None:
    config = RoundConfig(floor_mbps=8.0, grace_s=20.0, slack_s=30.0)
    assert config.transfer_s(5_000_000) == 5.0
    longest_s = config.transfer_s(5_000_000) + 7.0 + config.grace_s + config.transfer_s(5_000_000)
    assert config.round_s(5_000_000, detection_s=7.0) > longest_s


def test_a_pair_is_apart_when_either_says_so_and_both_live() -> None:
    members = {
        "b": replace(member("b"), unreachable=("a", "x", "nobody")),
        "a": member("a"),
        "c": replace(member("c"), unreachable=("b",)),
        "x": replace(member("x", Health.DEAD), unreachable=("c",)),
    }
    assert View(members).unreachable == {("a", "b"), ("b", "c")}


@pytest.mark.parametrize(
    ("seen", "reducer"),
    [
        (view("abcd"), "d"),
        (view("abc", suspect="d"), "a"),
        (view("abc", dead="d"), "a"),
        (view("abcd", unreachable="da"), "b"),
        (view("abd", suspect="c", unreachable="da"), "b"),
        (view("bcd", dead="a", unreachable="da"), "d"),
        (view("abcdx", unreachable="dx"), "d"),
        (view("ad", dead="bc", unreachable="ad"), "a"),
        (view("yx", dead="abcd"), "x"),
        (view("x", dead="abc", suspect="d"), None),
        (view("", dead="abcd"), None),
    ],
    ids=[
        "all",
        "not the suspect",
        "not the dead",
        "not who is cut off from another",
        "nor the suspect besides",
        "a cut to the dead does not matter",
        "nor one to who is not in the round",
        "of two, the one that is reached",
        "where all are gone, a peer outside",
        "but not while one is only suspected",
        "nobody",
    ],
)
def test_a_shard_goes_to_a_peer_that_everybody_reaches(seen: View, reducer: str | None) -> None:
    assert seen.reducer("dabc") == reducer


def test_where_nobody_is_reached_by_all_anyone_reduces() -> None:
    cut = {peer: replace(member(peer), unreachable=(other,)) for peer, other in ("ad", "da")}
    assert View(cut).reducer("dabc") == "d"
