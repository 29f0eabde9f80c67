"""One peer's machine of membership, what it wants done, and short ways to make it suspect."""

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from murmuration.worker.membership import (
    Action,
    Health,
    IndirectProbe,
    Member,
    Membership,
    MembershipConfig,
    Probe,
)

CONFIG = MembershipConfig(
    gossip_s=0.25, probe_s=1.0, probe_timeout_s=1.0, suspicion_factor=4.0, reconnect_s=5.0
)
SUSPICION_S = CONFIG.suspicion_s(4)


def member(peer: str, **changes: object) -> Member:
    return replace(Member(peer, f"at-{peer}", epoch=1), **changes)


class Watched(Membership):
    """`changed` says whether the last event has changed the view."""

    changed: bool


def _watched(name: str) -> Callable[..., list[Action]]:
    def event(self: Watched, *given: Any, **named: Any) -> list[Action]:
        actions = getattr(Membership, name)(self, *given, **named)
        self.changed = self.view_changed()
        return actions or []

    return event


_EVENTS = "tick hear probed probed_for suspect waited_in_vain round_ended update expel leave"
for _name in _EVENTS.split():
    setattr(Watched, _name, _watched(_name))


def machine(*others: str, config: MembershipConfig = CONFIG) -> Watched:
    """`me`, who knows `others` and has not ticked yet."""
    membership = Watched(member("me"), config, random.Random(0))
    membership.hear(tuple(member(other) for other in others), None, 0.0)
    return membership


def health(membership: Membership, peer: str) -> Health:
    return next(each.health for each in membership.members if each.peer == peer)


def probes(actions: Sequence[Action]) -> list[str]:
    return [action.peer for action in actions if isinstance(action, Probe)]


def asked(actions: Sequence[Action]) -> list[IndirectProbe]:
    return [action for action in actions if isinstance(action, IndirectProbe)]


def suspect(membership: Membership, peer: str, now: float) -> None:
    """Probes of `peer` fail, the indirect ones too."""
    for _ in asked(membership.probed(peer, now, answered=False)):
        membership.probed_for(peer, now, alive=False)
    assert health(membership, peer) is Health.SUSPECT


def tick_until(
    membership: Membership, start: float, stop: float, silent: Collection[str] = ()
) -> None:
    """Ticks ten times a second. The silent answer no probe, nor those who are suspected already."""
    for tenth in range(round(10 * start), round(10 * stop) + 1):
        now = tenth / 10
        for peer in probes(membership.tick(now)):
            lives = peer not in silent and health(membership, peer) is not Health.SUSPECT
            for ask in asked(membership.probed(peer, now, answered=lives)):
                membership.probed_for(ask.peer, now, alive=False)
