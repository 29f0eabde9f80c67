"""Whom rounds wait for no more: who was late in three of the last eight."""

import pytest

from murmuration.worker.membership.idle import IdlePeers

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
