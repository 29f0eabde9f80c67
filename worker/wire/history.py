"""Whose contributions the last rounds of a state have counted, as it travels with the state."""

from murmuration.algorithms.counted import MOST_PARTS, RECORDED_ROUNDS, CountedRound, History, Part
from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker.wire.errors import WireError
from murmuration.worker.wire.messages import check_name


def history_to_message(history: History) -> pb.History:
    """Each name stands in it once."""
    names = sorted({peer for each in history for *_, peers in each.parts for peer in peers})
    places = {name: place for place, name in enumerate(names)}
    return pb.History(
        peers=names,
        rounds=[
            pb.CountedRound(
                round=each.round,
                parts=[
                    pb.CountedPart(
                        start=start, stop=stop, contributors=[places[peer] for peer in peers]
                    )
                    for start, stop, peers in each.parts
                ],
            )
            for each in history
        ],
    )


def history_from_message(message: pb.History, elements: int, most_peers: int) -> History:
    """Raises WireError: it fits no fragment of so many values, or is longer than any is.

    Args:
        most_peers: that can be named.
    """
    if len(message.peers) > most_peers or len(message.rounds) > RECORDED_ROUNDS:
        raise WireError(f"a history of {len(message.peers)} peers, {len(message.rounds)} rounds")
    names = tuple(message.peers)
    for name in names:
        check_name(name)
    return tuple(
        CountedRound(each.round, tuple(_parts(each, names, elements))) for each in message.rounds
    )


def _parts(message: pb.CountedRound, names: tuple[str, ...], elements: int) -> list[Part]:
    parts: list[Part] = []
    if len(message.parts) > MOST_PARTS:
        raise WireError(f"a history of {len(message.parts)} ranges in round {message.round}")
    for part in message.parts:
        at = parts[-1][1] if parts else 0
        if not at <= part.start < part.stop <= elements:
            raise WireError(f"a history of values {part.start} to {part.stop} of {elements}")
        if len(part.contributors) > len(names) or max(part.contributors, default=0) >= len(names):
            raise WireError(f"a history of more than its {len(names)} peers")
        parts.append((part.start, part.stop, tuple(names[place] for place in part.contributors)))
    return parts
