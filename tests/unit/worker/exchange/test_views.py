"""What a view of the swarm says of peers that others do not reach."""

from dataclasses import replace

import pytest

from murmuration.worker.exchange.view import View
from murmuration.worker.membership import Digest, Health, Member, Phase


def view(**unreachable: str) -> View:
    """Peers a to d that train; each does not reach those named, letter by letter."""
    members = [
        Member(
            peer,
            f"at-{peer}",
            1,
            phase=Phase.TRAINING,
            unreachable=tuple(unreachable.get(peer, "")),
            digests=(Digest(3, 4, 0),),
        )
        for peer in "abcd"
    ]
    return View({member.peer: member for member in members})


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
    assert view(**unreachable).cut_off == frozenset(cut_off)


def test_no_round_waits_for_a_peer_that_is_cut_off() -> None:
    seen = view(a="d", b="d", c="d")
    assert seen.live("d")
    assert not seen.usable("d")
    assert not seen.will_contribute("d", 0, 3)
    assert seen.joinable() == frozenset("abc") == seen.in_draw(0)
    assert seen.reducer("dcba") == "c"


@pytest.mark.parametrize(("late", "found"), [("", ""), ("d", "d"), ("cd", "cd"), ("bcd", "")])
def test_up_to_half_of_the_peers_are_believed_that_they_do_not_keep_up(
    late: str, found: str
) -> None:
    members = {
        peer: replace(member, idle=(peer,) if peer in late else ())
        for peer, member in view().members.items()
    }
    seen = View(members)
    assert seen.late == seen.cut_off == frozenset(found)
    assert {peer for peer in "abcd" if seen.will_contribute(peer, 0, 3)} == {*"abcd"} - {*found}
    assert seen.joinable() == frozenset("abcd")
    assert seen.reducer("dcba") == max({*"abcd"} - {*found})


def test_what_the_dead_said_does_not_count() -> None:
    members = view(a="d", b="d", c="d").members
    dead = {
        peer: Member(peer, f"at-{peer}", 1, health=Health.DEAD, unreachable=("d",)) for peer in "ab"
    }
    assert View({**members, **dead}).cut_off == frozenset("d")  # c is all the others
    quiet = Member("c", "at-c", 1)
    assert View({**members, **dead, "c": quiet}).cut_off == frozenset()


def test_for_a_group_that_is_cut_off_another_stands_in() -> None:
    assert view(a="d", b="d", c="d").reducer("d") == "a"


def test_what_the_ended_say_does_not_count_nor_what_those_say_that_never_contributed() -> None:
    members = view(a="d", b="d", c="d").members
    assert View(members, contributors=frozenset("cdx")).cut_off == frozenset("d")
    assert View(members, contributors=frozenset("d")).cut_off == frozenset()
    ended = {peer: replace(members[peer], phase=Phase.DONE) for peer in "ab"}
    quiet = replace(members["c"], unreachable=())
    assert View({**members, **ended, "c": quiet}).cut_off == frozenset()
    over = {peer: replace(each, phase=Phase.DONE) for peer, each in members.items()}
    assert View(over).cut_off == frozenset("d")
