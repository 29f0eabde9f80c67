"""What is said against peers, and how long each has left to show that it lives.

What others say makes this peer probe the accused, and no more. Where these probes fail as well, the
accused is a suspect. It is declared dead when its time is up: at first `most_s`, less with each
further peer that says the same, and never below `least_s`.

Ref: local health aware suspicion (Lifeguard, arXiv:1707.00788, section IV-B). Difference: whoever
accuses has failed to reach the accused itself, and the time counts from the first accusation.
"""

import math
from collections import Counter
from dataclasses import dataclass, field

CONFIRMATIONS = 3  # accusers beyond the first that shorten the time all the way
_MOST_ACCUSERS = 16  # that are kept by name
_NEVER = -math.inf


@dataclass
class Case:
    """Against one life of a peer.

    Args:
        life: its epoch and incarnation.
        since: when it was first accused (s).
        accusers: peers that say so; this one too, once its own probes have failed.
        left: the accusers say that it has left, and not that it is dead.
        failed: this peer's own probes have all failed.
        ended: its time was up.
    """

    life: tuple[int, int]
    since: float
    accusers: set[str] = field(default_factory=set)
    left: bool = False
    failed: bool = False
    ended: bool = False


class Suspicions:
    """Args: pause_s: after an answer of the accused, before hearsay makes this peer probe again."""

    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s
        self._cases: dict[str, Case] = {}
        self._answered_at: dict[str, float] = {}
        self._words: dict[str, Counter[str]] = {}  # by peer, how often each accuser has said so

    def get(self, peer: str) -> Case | None:
        return self._cases.get(peer)

    @property
    def accused(self) -> tuple[str, ...]:
        """Peers with a case, in the order in which they were accused."""
        return tuple(peer for peer, case in self._cases.items() if not case.ended)

    def accuse(self, peer: str, life: tuple[int, int], accuser: str | None, now: float) -> Case:
        """Somebody, who may be this peer, says that this life of a peer has ended."""
        case = self._cases.get(peer)
        if case is None or case.life < life:
            case = self._cases[peer] = Case(life, now)
        if accuser is not None and len(case.accusers) < _MOST_ACCUSERS:
            case.accusers.add(accuser)
        return case

    def count(self, peer: str, accuser: str) -> None:
        """The accuser says that the peer has ended, once more."""
        words = self._words.setdefault(peer, Counter())
        if accuser in words or len(words) < _MOST_ACCUSERS:
            words[accuser] += 1

    def words_against(self, peer: str) -> dict[str, int]:
        """By accuser."""
        return dict(self._words.get(peer, ()))

    def rests(self, peer: str, now: float) -> bool:
        """Whether the peer has answered so lately that hearsay means nothing."""
        return now < self._answered_at.get(peer, _NEVER) + self._pause_s

    def answered(self, peer: str, now: float) -> None:
        """It lives: it has answered this peer's own probe, or another's in its place."""
        if self._cases.pop(peer, None) is not None:
            self._answered_at[peer] = now

    def forget_words(self, peer: str) -> None:
        """They were true, or of an earlier life."""
        self._words.pop(peer, None)

    def close(self, peer: str) -> Case | None:
        """It has refuted, or left, or begun again. Returns the case that there was."""
        return self._cases.pop(peer, None)

    def postpone(self, seconds: float) -> None:
        """This process did not run for so long: nobody could have been heard."""
        for case in self._cases.values():
            case.since += seconds

    def end_due(self, now: float, least_s: float, most_s: float) -> list[str]:
        """Ends the cases whose time is up, after this peer's own probes have failed. Returns whom
        they are against."""
        due = []
        for peer, case in self._cases.items():
            until = case.since + time_s(len(case.accusers), least_s, most_s)
            if case.failed and not case.ended and now >= until:
                case.ended = True
                due.append(peer)
        return due


def time_s(accusers: int, least_s: float, most_s: float) -> float:
    """How long a suspect has, that so many accuse."""
    further = min(CONFIRMATIONS, max(0, accusers - 1))
    share = math.log(further + 1) / math.log(CONFIRMATIONS + 1)
    return max(least_s, most_s - share * (most_s - least_s))
