"""Whose contributions a state's rounds have counted, as that travels with the state."""

import pytest

from murmuration.algorithms.counted import (
    MOST_PARTS,
    RECORDED_ROUNDS,
    CountedRound,
    History,
    counted_of,
    from_plain,
    recorded,
    to_plain,
    without,
)
from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker.wire import WireError, history_from_message, history_to_message

HISTORY = (
    CountedRound(3, ((0, 4, ("a", "b")), (4, 10, ("b",)))),
    CountedRound(4, ((0, 10, ("a", "b", "c")),)),
)


def test_it_arrives_as_it_was() -> None:
    raw = history_to_message(HISTORY).SerializeToString()
    assert history_from_message(pb.History.FromString(raw), 10, 3) == HISTORY
    assert from_plain(to_plain(HISTORY)) == HISTORY
    assert history_from_message(pb.History(), 10, 3) == ()


@pytest.mark.parametrize(
    ("history", "elements", "most_peers"),
    [
        (HISTORY, 9, 3),
        (HISTORY, 10, 2),
        (HISTORY * RECORDED_ROUNDS, 10, 3),
        ((CountedRound(0, ((4, 8, ("a",)), (0, 4, ("a",)))),), 10, 3),
        ((CountedRound(0, tuple((k, k + 1, ("a",)) for k in range(MOST_PARTS + 1))),), 999, 3),
        ((CountedRound(0, ((0, 10, ("a", "a")),)),), 10, 3),
    ],
    ids=["past the end", "too many peers", "too long", "out of order", "too many parts", "twice"],
)
def test_what_fits_no_fragment_is_refused(history: History, elements: int, most_peers: int) -> None:
    with pytest.raises(WireError):
        history_from_message(history_to_message(history), elements, most_peers)


def test_a_place_beyond_the_peers_is_refused() -> None:
    part = pb.CountedPart(start=0, stop=4, contributors=[1])
    message = pb.History(peers=["a"], rounds=[pb.CountedRound(parts=[part])])
    with pytest.raises(WireError):
        history_from_message(message, 10, 3)


def test_shards_of_the_same_peers_are_one_part_and_old_rounds_go() -> None:
    history: History = ()
    for round_ in range(RECORDED_ROUNDS + 2):
        parts = [(4, 6, ("a",)), (0, 2, ("a", "b")), (2, 4, ("a", "b"))]
        history = recorded(history, round_, parts)
    assert [each.round for each in history] == list(range(2, RECORDED_ROUNDS + 2))
    assert history[0].parts == ((0, 4, ("a", "b")), (4, 6, ("a",)))
    assert counted_of(history, 5, "b") == ((0, 4),)
    assert counted_of(history, 5, "a") == ((0, 6),)
    assert counted_of(history, 5, "c") == ()
    assert counted_of(history, 1, "a") is None
    assert recorded(history, 99, ()) is history


def test_ranges_without_others() -> None:
    assert without(((0, 4), (6, 9)), ((1, 2), (3, 7))) == ((0, 1), (2, 3), (7, 9))
    assert without(((0, 4),), ()) == ((0, 4),)
    assert without(((0, 4),), ((0, 4),)) == ()
