"""Peers that no round can count on though they live: a link is cut, a port is closed, or they have
let a round wait for nothing."""

from dataclasses import dataclass

from worker.membership.member import MAX_UNREACHABLE

_MISSED = 3  # probes running; fewer are chance on a link that loses messages
_MOST_FLAPS = 4  # after which a mark stays no longer than after as many
_IDLE_S = 60.0  # for which a peer stays marked that has let a round wait; doubles each time
_MOST_IDLE = 6  # doublings
_FORGIVEN_S = 600.0  # after a mark has ended, the next one is a first one


@dataclass
class _PeerLink:
    """To a peer that has not answered; times in s."""

    missed_since: float
    missed: int = 0
    unreachable: bool = False
    flaps: int = 0  # how often it was unreachable and then reachable again
    answers_since: float | None = None


@dataclass
class _Idle:
    """A peer that rounds have waited for in vain. Args: until: when they may do so again, in s."""

    until: float
    times: int
    marked: bool = True


class Reachability:
    """Judges by the probes of this peer, and by the rounds that it waited in.

    Args:
        brief_s: shorter cuts are ignored. An unreachable peer stays so until it has answered for
            twice that long, and that time doubles each time that the link fails again: what others
            do about a cut costs more than to leave it marked.
    """

    def __init__(self, brief_s: float) -> None:
        self._brief_s = brief_s
        self._links: dict[str, _PeerLink] = {}
        self._idle: dict[str, _Idle] = {}

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

    def waited_in_vain(self, peer: str, now: float) -> None:
        """A round has waited for the peer's part, which never came: for a while none waits for it.

        To begin again, in another epoch too, ends it no sooner: else a peer could make every round
        wait."""
        idle = self._idle.get(peer)
        if idle is None or not idle.marked:
            times = 0 if idle is None else idle.times
            stays_s = _IDLE_S * 2 ** min(times, _MOST_IDLE)
            self._idle[peer] = _Idle(now + stays_s, times + 1)

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
        cut = {peer for peer, link in self._links.items() if link.unreachable}
        idle = {peer for peer, idle in self._idle.items() if idle.marked}
        return tuple(sorted(cut | idle))[:MAX_UNREACHABLE]

    def tick(self, now: float) -> None:
        """Ends the marks of peers that rounds may wait for again."""
        for peer, idle in [*self._idle.items()]:
            idle.marked = now < idle.until
            if now > idle.until + _FORGIVEN_S:
                del self._idle[peer]
