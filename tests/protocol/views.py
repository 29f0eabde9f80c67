"""Short ways to say what membership sees."""

from collections.abc import Iterable
from dataclasses import replace

from murmuration.worker.exchange.view import View
from murmuration.worker.membership import Digest, Health, Member, Phase


def member(
    peer: str,
    health: Health = Health.ALIVE,
    phase: Phase = Phase.TRAINING,
    versions: Iterable[int] = (0,),
) -> Member:
    """A peer that is at these versions of the fragments."""
    digests = tuple(Digest(version, 0, 0) for version in versions)
    return Member(peer, f"{peer}:1", start_ms=1, health=health, phase=phase, digests=digests)


def view(peers: str = "", *, suspect: str = "", dead: str = "", unreachable: str = "") -> View:
    """Peers by single letters; the two in `unreachable` do not reach each other."""
    members = [member(peer) for peer in peers]
    members += [member(peer, Health.SUSPECT) for peer in suspect]
    members += [member(peer, Health.DEAD) for peer in dead]
    told = [
        replace(each, unreachable=(unreachable[1],)) if each.peer in unreachable[:1] else each
        for each in members
    ]
    return View({each.peer: each for each in told})
