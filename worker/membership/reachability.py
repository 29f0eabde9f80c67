"""Whom a peer does not reach itself, though others do: a link is cut, not a peer dead."""

from dataclasses import dataclass

from worker.membership.member import MAX_UNREACHABLE

_MISSED = 3  # probes running; fewer are chance on a link that loses messages
_MOST_FLAPS = 4  # after which a mark stays no longer than after as many


@dataclass
class _Link:
    """To a peer that has not answered; times in s."""

    missed_since: float
    missed: int = 0
    unreachable: bool = False
    flaps: int = 0  # how often it was apart and was not any more
    answers_since: float | None = None


class Reachability:
    """Judges by the probes of this peer.

    Args:
        brief_s: a cut that is over sooner is none. Who is apart is so until it has answered for
            twice that long, and twice as long again each time that the link has failed anew: what
            others do about a cut costs more than to go on with it.
    """

    def __init__(self, brief_s: float) -> None:
        self._brief_s = brief_s
        self._links: dict[str, _Link] = {}

    def answered(self, peer: str, now: float) -> None:
        """A probe of this peer's own, at monotonic time `now` (s)."""
        if (link := self._links.get(peer)) is None:
            return
        link.missed = 0
        if link.answers_since is None:
            link.answers_since = now
        steady_s = 2 * self._brief_s * 2 ** min(link.flaps, _MOST_FLAPS)
        if link.unreachable and now - link.answers_since >= steady_s:
            link.unreachable, link.flaps = False, link.flaps + 1

    def answered_to_others(self, peer: str, now: float) -> None:
        """A probe in this peer's place, after its own has failed."""
        link = self._links.setdefault(peer, _Link(now))
        if link.missed == 0:
            link.missed_since = now
        link.missed, link.answers_since = link.missed + 1, None
        if link.missed >= _MISSED and now - link.missed_since >= self._brief_s:
            link.unreachable = True

    def forget(self, peer: str) -> None:
        """It is gone, or another than it was."""
        self._links.pop(peer, None)

    @property
    def in_question(self) -> list[str]:
        """Peers that want another probe soon: they may be apart, or no longer."""
        return [
            peer
            for peer, link in self._links.items()
            if (link.answers_since is not None if link.unreachable else link.missed > 0)
        ]

    @property
    def unreachable(self) -> tuple[str, ...]:
        """The peers out of reach, by name; as many as a card holds."""
        return tuple(sorted(p for p, link in self._links.items() if link.unreachable))[
            :MAX_UNREACHABLE
        ]
