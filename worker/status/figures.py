"""What this peer measures of itself and of its links, for faults to be located by."""

import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from murmuration.algorithms.diagnosis import PeerFigures
from murmuration.protos.events import float_of, int_of
from murmuration.worker.exchange.measured import Arrivals

_ROUNDS = 5  # that a median is over
_SAVES = 3
_OLD_ROUNDS = 64  # since a peer has sent something: then it is not told any more
_MOST_SENDERS = 64


@dataclass(frozen=True)
class _Came:
    """From one sender in one round: its number, bytes, seconds."""

    round: int
    payload_bytes: int
    seconds: float


class OwnFigures:
    """The figures of the last rounds. io thread only, but `saved`.

    Args:
        peer: this one's name.
        arrivals: of payloads here.
        clock: monotonic seconds.
    """

    def __init__(self, peer: str, arrivals: Arrivals, clock: Callable[[], float]) -> None:
        self._peer, self._arrivals, self._clock = peer, arrivals, clock
        self._rounds = self._saves = 0
        self._ended_s: float | None = None
        self._round_s: deque[float] = deque(maxlen=_ROUNDS)
        self._stall_s: deque[float] = deque(maxlen=_ROUNDS)
        self._steps: deque[tuple[int, float]] = deque(maxlen=_ROUNDS)
        self._save_s: deque[float] = deque(maxlen=_SAVES)
        self._received: dict[str, deque[_Came]] = {}

    def round_ended(self) -> None:
        """A round of this peer's has come back."""
        now, self._rounds = self._clock(), self._rounds + 1
        if self._ended_s is not None:
            self._round_s.append(now - self._ended_s)
        self._ended_s = now
        for sender, (payload_bytes, seconds) in self._arrivals.taken().items():
            came = self._received.setdefault(sender, deque(maxlen=_ROUNDS))
            came.append(_Came(self._rounds, payload_bytes, seconds))
        late = self._rounds - _OLD_ROUNDS
        kept = [(peer, came) for peer, came in self._received.items() if came[-1].round > late]
        kept.sort(key=lambda each: -each[1][-1].round)
        self._received = dict(kept[:_MOST_SENDERS])

    def applied(self, event: Mapping[str, object]) -> None:
        """The train thread's word on a round: an event `round`."""
        self._stall_s.append(float_of(event, "stall_s") or 0.0)
        steps, step_s = int_of(event, "steps"), float_of(event, "step_s")
        if steps and step_s is not None:
            self._steps.append((steps, step_s))

    def saved(self, seconds: float) -> None:
        """A checkpoint was written. any thread."""
        self._save_s.append(seconds)
        self._saves += 1

    def figures(self) -> PeerFigures:
        """As they are now."""
        return PeerFigures(
            peer=self._peer,
            rounds=self._rounds,
            round_s=_median(self._round_s),
            stall_s=statistics.fmean(self._stall_s) if self._stall_s else None,
            step_s=_median(step_s for _, step_s in self._steps),
            steps=_median(steps for steps, _ in self._steps) or 0.0,
            saves=self._saves,
            save_s=_median(list(self._save_s)),
            received={peer: _rate(came) for peer, came in self._received.items()},
        )


def to_document(figures: PeerFigures) -> dict[str, object]:
    """As it travels: plain values."""
    return {
        "rounds": figures.rounds,
        "round_s": _short(figures.round_s),
        "stall_s": _short(figures.stall_s),
        "step_s": _short(figures.step_s),
        "steps": figures.steps,
        "saves": figures.saves,
        "save_s": _short(figures.save_s),
        "received": {
            peer: {"mbps": _short(mbps), "seconds": _short(seconds)}
            for peer, (mbps, seconds) in figures.received.items()
        },
    }


def from_document(peer: str, document: Mapping[str, Any]) -> PeerFigures:
    """What another peer says of itself; what does not fit counts as missing."""
    received = document.get("received")
    came: dict[str, tuple[float, float]] = {}
    for sender, pair in (
        list(received.items())[:_MOST_SENDERS] if isinstance(received, dict) else ()
    ):
        if isinstance(pair, dict):
            mbps, seconds = float_of(pair, "mbps"), float_of(pair, "seconds")
            if mbps is not None and seconds is not None:
                came[sender] = (mbps, seconds)
    return PeerFigures(
        peer=peer,
        rounds=int_of(document, "rounds") or 0,
        round_s=float_of(document, "round_s"),
        stall_s=float_of(document, "stall_s"),
        step_s=float_of(document, "step_s"),
        steps=float_of(document, "steps") or 0.0,
        saves=int_of(document, "saves") or 0,
        save_s=float_of(document, "save_s"),
        received=came,
    )


def _rate(came: Iterable[_Came]) -> tuple[float, float]:
    """Medians: Mbit/s, and seconds of a round."""
    kept = list(came)
    mbps = statistics.median(8e-6 * each.payload_bytes / max(each.seconds, 1e-6) for each in kept)
    return mbps, statistics.median(each.seconds for each in kept)


def _median(values: Iterable[float]) -> float | None:
    known = list(values)
    return statistics.median(known) if known else None


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
