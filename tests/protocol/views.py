"""Short ways to say what membership sees."""

from collections.abc import Iterable
from dataclasses import replace

from worker.exchange.types import View
from worker.membership import Card, Digest, Health, Phase


def card(
    peer: str,
    health: Health = Health.ALIVE,
    phase: Phase = Phase.TRAINING,
    versions: Iterable[int] = (0,),
) -> Card:
    """A peer that is at these versions of the fragments."""
    digests = tuple(Digest(version, 0, 0) for version in versions)
    return Card(peer, f"{peer}:1", epoch=1, health=health, phase=phase, digests=digests)


def view(
    peers: str = "",
    *,
    suspect: str = "",
    dead: str = "",
    left: str = "",
    done: str = "",
    starting: str = "",
    ahead: str = "",
    apart: str = "",
) -> View:
    """Peers by single letters; those in `ahead` have applied round 0 already, and the two in
    `apart` do not reach each other."""
    cards = [card(peer) for peer in peers]
    cards += [card(peer, Health.SUSPECT) for peer in suspect]
    cards += [card(peer, Health.DEAD) for peer in dead]
    cards += [card(peer, Health.LEFT) for peer in left]
    cards += [card(peer, phase=Phase.DONE) for peer in done]
    cards += [card(peer, phase=Phase.STARTING, versions=()) for peer in starting]
    cards += [card(peer, versions=(1,)) for peer in ahead]
    told = [replace(each, apart=(apart[1],)) if each.peer in apart[:1] else each for each in cards]
    return View({each.peer: each for each in told})
