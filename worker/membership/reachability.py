"""Peers that this one does not reach though they live: a link is cut, or a port is closed."""

from dataclasses import dataclass

from murmuration.worker.membership.member import MAX_UNREACHABLE

_MISSED = 3  # probes running; fewer are chance on a link that loses messages
_MOST_FLAPS = 4  # after which a mark stays no longer than after as many


@dataclass
class _PeerLink:
    """To a peer that has not answered; times in s."""

    missed_since: float
    missed: int = 0
    unreachable: bool = False
    flaps: int = 0  # how often it was unreachable and then reachable again
    answers_since: float | None = None


class Reachability:
    """Judges by the probes of this peer.

    Args:
        brief_s: shorter cuts are ignored. An unreachable peer stays so until it has answered for
            twice that long, and that time doubles each time that the link fails again: what others
            do about a cut costs more than to leave it marked.
    """

    def __init__(self, brief_s: float) -> None:
        self._brief_s = brief_s
        self._links: dict[str, _PeerLink] = {}

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
        self._missed(peer, 1, now)

    def refuted(self, peer: str, now: float) -> None:
        """It says that it lives, after this peer's own probe and those in its place have failed."""
        self._missed(peer, 2, now)

    def _missed(self, peer: str, probes: int, now: float) -> None:
        link = self._links.setdefault(peer, _PeerLink(now))
        if link.missed == 0:
            link.missed_since = now
        link.missed, link.answers_since = link.missed + probes, None
        if link.missed >= _MISSED and now - link.missed_since >= self._brief_s:
            link.unreachable = True

    def forget(self, peer: str) -> None:
        """The peer is gone, or has another epoch or address."""
        self._links.pop(peer, None)

    @property
    def in_question(self) -> list[str]:
        """Peers to probe again soon: they may be unreachable, or no longer so."""
        return [
            peer
            for peer, link in self._links.items()
            if (link.answers_since is not None if link.unreachable else link.missed > 0)
        ]

    @property
    def unreachable(self) -> tuple[str, ...]:
        """The unreachable peers, sorted; as many as a member may name."""
        return tuple(sorted(p for p, link in self._links.items() if link.unreachable))[
            :MAX_UNREACHABLE
        ]
