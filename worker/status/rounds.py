"""A peer's own rounds, as its status tells of them: totals, the latest, and those on their way."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from murmuration.protos.events import float_of, int_of, text_of

_REMEMBERED = 48  # rounds: of a status that is asked for every two seconds
_MOST_ON_THE_WAY = 4096  # one of each fragment


@dataclass
class _LoggedRound:
    """Times are of the clock (s). Args: resumed_s: when the training went on after its wait."""

    fragment: int
    round: int
    began_s: float
    ended_s: float | None = None
    failed: bool = False
    waited_for: str = ""
    stall_s: float = 0.0
    resumed_s: float | None = None


class RoundLog:
    """io thread only.

    Args: clock: monotonic seconds.

    Attributes:
        done, failed: rounds so far.
        steps_lost: inner steps, since something was not finite.
        exchange_s: how long those that were completed were on their way, and the last of them.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.done, self.failed, self.exchange_s = 0, 0, 0.0
        self.steps_lost = 0
        self.last_exchange_s: float | None = None
        self._on_the_way: dict[int, _LoggedRound] = {}  # by fragment
        self._recent: deque[_LoggedRound] = deque(maxlen=_REMEMBERED)
        self._waiting_since: float | None = None

    def began(self, fragment: int, round_: int) -> None:
        """A round was sent."""
        if len(self._on_the_way) < _MOST_ON_THE_WAY:
            self._on_the_way[fragment] = _LoggedRound(fragment, round_, self._clock())

    def completed(self, fragment: int, round_: int, exchange_s: float, waited_for: str) -> None:
        """One has closed. Args: exchange_s: how long it was on its way."""
        self.done += 1
        self.exchange_s += exchange_s
        self.last_exchange_s = round(exchange_s, 3)
        ended = self._end(fragment, round_)
        ended.began_s, ended.waited_for = self._clock() - exchange_s, waited_for

    def gave_up(self, fragment: int, round_: int, waited_for: str) -> None:
        """One has come to nothing."""
        self.failed += 1
        ended = self._end(fragment, round_)
        ended.failed, ended.waited_for = True, waited_for

    def told(self, event: Mapping[str, object]) -> None:
        """What the training says: that it waits, that it goes on, for whom it has waited."""
        match event.get("event"):
            case "progress":
                waits = event.get("state") == "waiting"
                self._waiting_since = self._clock() if waits else None
            case "round":
                self._waiting_since = None
                key = int_of(event, "fragment"), int_of(event, "round")
                for each in self._recent:
                    if (each.fragment, each.round) == key:
                        each.resumed_s = self._clock()
                        each.stall_s = float_of(event, "stall_s") or 0.0
                        each.waited_for = text_of(event, "waited_for") or each.waited_for
            case "round_failed":
                self._waiting_since = None
            case "put_back":
                self.steps_lost = int_of(event, "steps_lost") or 0

    def waiting_s(self) -> float | None:
        """How long the training has stood still by now; None while it does not."""
        return None if self._waiting_since is None else self._ago(self._waiting_since)

    def recent(self) -> list[dict[str, object]]:
        """The latest rounds, and those on their way. Times are ages: clocks of peers differ."""
        return [self._plain(each) for each in (*self._recent, *self._on_the_way.values())]

    def _end(self, fragment: int, round_: int) -> _LoggedRound:
        each = self._on_the_way.pop(fragment, None)
        if each is None or each.round != round_:
            each = _LoggedRound(fragment, round_, self._clock())
        each.ended_s = self._clock()
        self._recent.append(each)
        return each

    def _plain(self, each: _LoggedRound) -> dict[str, object]:
        return {
            "fragment": each.fragment,
            "round": each.round,
            "began_s_ago": self._ago(each.began_s),
            "ended_s_ago": None if each.ended_s is None else self._ago(each.ended_s),
            "failed": each.failed,
            "waited_for": each.waited_for,
            "stall_s": round(each.stall_s, 3),
            "resumed_s_ago": None if each.resumed_s is None else self._ago(each.resumed_s),
        }

    def _ago(self, time_s: float) -> float:
        return round(self._clock() - time_s, 3)
