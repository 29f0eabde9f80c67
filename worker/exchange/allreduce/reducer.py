"""The shards that this peer reduces: who may contribute, when the mean closes, who gets the answer.

A shard closes when everyone awaited has contributed, or when a quorum has and the grace is over.
It closes once: later offers get the same answer. A successor takes over a shard when it sees nobody
before itself in the shard's order who may reduce it, and hands it back as long as it has not closed
it.

A peer remembers the reductions that it received as a contributor too, so that a successor of a
reducer which died while answering gives the answer that others may already have applied.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from worker.exchange.types import RoundConfig, RoundTick, ShardKey, View, ViewUpdated

Orders = Callable[[int, tuple[str, ...]], Sequence[Sequence[str]]]

# ------------------------------------------------------------------------------------- events


@dataclass(frozen=True)
class Advanced:
    """This peer's own state of a fragment is at `version` now, and `group` lays out that round."""

    fragment: int
    version: int
    group: tuple[str, ...]


@dataclass(frozen=True)
class Contributed:
    """A contribution is here, complete and verified."""

    key: ShardKey
    peer: str


@dataclass(frozen=True)
class Withdrawn:
    """The peer is sending another contribution in place of the one that was here."""

    key: ShardKey
    peer: str


@dataclass(frozen=True)
class Closed:
    """The reduction of the shard is known: computed here, or received from its reducer."""

    key: ShardKey


@dataclass(frozen=True)
class NotReduced:
    """A `Compute` has failed; nothing that was contributed is here any more."""

    key: ShardKey


Event = RoundTick | ViewUpdated | Advanced | Contributed | Withdrawn | Closed | NotReduced

# -------------------------------------------------------------------------- actions, decisions


@dataclass(frozen=True)
class Compute:
    """Average the contributions in this order, then report `Closed`."""

    key: ShardKey
    contributors: tuple[str, ...]
    next_group: tuple[str, ...]


@dataclass(frozen=True)
class Abandon:
    """Tell those who wait for this shard to go to `peer`."""

    key: ShardKey
    peer: str


@dataclass(frozen=True)
class Discard:
    """Forget all contributions and reductions of a round: it is laid out anew."""

    fragment: int
    round: int


@dataclass(frozen=True)
class Prune:
    """Forget what is kept about rounds of the fragment before `round`."""

    fragment: int
    round: int


Action = Compute | Abandon | Discard | Prune


@dataclass(frozen=True)
class Hold:
    """Too early to say: ask again when this peer's state has changed."""


@dataclass(frozen=True)
class Accept:
    """Take the contribution; the group lays out the shards."""

    group: tuple[str, ...]


@dataclass(frozen=True)
class Answer:
    """The shard is closed: give the reduction, take nothing."""


@dataclass(frozen=True)
class RedirectTo:
    peer: str


@dataclass(frozen=True)
class Refuse:
    """`kind`: `group`, `pruned`: the sender must repair its state first; `invalid`: it does not
    fit; `again`: trying again helps."""

    kind: str
    reason: str


Decision = Hold | Accept | Answer | RedirectTo | Refuse


@dataclass
class _Open:
    contributors: set[str] = field(default_factory=set)
    quorum_at: float | None = None
    computing: bool = False


class Reducing:
    """All shards that this peer reduces.

    Args:
        me: this peer.
        orders: (fragment, round, group) -> per shard the peers that may reduce it, best first.
        config: closing rules.
        transfer_s: time that one fragment takes at the floor bandwidth, by fragment index.
        keep_rounds: how many closed rounds of a fragment are kept for late peers.
    """

    def __init__(
        self,
        me: str,
        orders: Orders,
        config: RoundConfig,
        transfer_s: Sequence[float],
        keep_rounds: int = 2,
    ) -> None:
        self._me, self._orders, self._config = me, orders, config
        self._transfer_s, self._keep = transfer_s, keep_rounds
        self._view = View()
        self._versions: dict[int, int] = {}
        self._groups: dict[tuple[int, int], tuple[str, ...]] = {}
        self._open: dict[ShardKey, _Open] = {}
        self._closed: set[ShardKey] = set()

    def offer(self, key: ShardKey, group: tuple[str, ...] | None) -> Decision:
        """What to do with a peer that wants to contribute to a shard.

        Args:
            key: the shard.
            group: the sender's group if it is ours too (the caller compares hashes), else None.
        """
        if key in self._closed:
            return Answer() if group is not None else self._other_group()
        version = self._versions.get(key.fragment)
        if version is None or key.round > version:
            return Hold()
        if key.round < version - self._keep:
            return Refuse("pruned", f"round {key.round} closed long ago, this peer is at {version}")
        if group is None:
            return self._other_group()
        shards = len(self._orders(key.fragment, group))
        if key.shard >= shards:
            return Refuse("invalid", f"shard {key.shard} of {shards}")
        above = self._above(key, group)
        if above is not None:
            return RedirectTo(above)
        if key.round < version and key not in self._open:
            # Applied here through others, and nobody left who knows the answer.
            return Refuse("pruned", f"round {key.round} is over, this peer is at {version}")
        return Accept(group)

    def group(self, fragment: int, round_: int) -> tuple[str, ...] | None:
        """The group that lays out a round, as far as this peer knows it."""
        return self._groups.get((fragment, round_))

    def awaited(self, key: ShardKey) -> tuple[str, ...]:
        """Who has not contributed yet to an open shard."""
        entry = self._open.get(key)
        group = self._groups.get((key.fragment, key.round))
        if entry is None or group is None:
            return ()
        return tuple(sorted(self._expected(key, group) - entry.contributors))

    def step(self, event: Event, now: float) -> list[Action]:
        """Takes one event at monotonic time `now` (s) and says what to do."""
        actions: list[Action] = []
        match event:
            case RoundTick():
                pass
            case ViewUpdated(view):
                self._view = view
                for key, entry in list(self._open.items()):
                    group = self._groups.get((key.fragment, key.round), ())
                    if group and not entry.computing and (above := self._above(key, group)):
                        del self._open[key]
                        actions.append(Abandon(key, above))
            case Advanced(fragment, version, group):
                actions += self._advanced(fragment, version, group)
            case Contributed(key, peer):
                if key not in self._closed:
                    self._open.setdefault(key, _Open()).contributors.add(peer)
            case Withdrawn(key, peer):
                if (tried := self._open.get(key)) and not tried.computing:
                    tried.contributors.discard(peer)
            case NotReduced(key):
                self._open.pop(key, None)
            case Closed(key):
                self._open.pop(key, None)
                self._closed.add(key)
        for key in sorted(self._open):
            actions += self._close_if_due(key, now)
        return actions

    # --------------------------------------------------------------------------------- inside

    @staticmethod
    def _other_group() -> Refuse:
        return Refuse("group", "the groups of this round differ")

    def _above(self, key: ShardKey, group: tuple[str, ...]) -> str | None:
        """The peer that is to reduce the shard in place of this one, if any.

        That somebody does not reach this peer moves nothing which has begun here, unless that one
        is awaited.
        """
        order = self._orders(key.fragment, group)[key.shard]
        best, view = self._view.reducer(order), self._view
        if best is None or best == self._me:
            return None
        if (begun := self._open.get(key)) is not None:
            before = takewhile(lambda peer: peer != self._me, order)
            awaited = self._expected(key, group) - begun.contributors
            moves = any(view.usable(peer) for peer in before)
            if not moves and all(view.reach(self._me, peer) for peer in awaited):
                return None
        return best

    def _expected(self, key: ShardKey, group: tuple[str, ...]) -> set[str]:
        return {peer for peer in group if self._view.will_contribute(peer, key.fragment, key.round)}

    def _advanced(self, fragment: int, version: int, group: tuple[str, ...]) -> list[Action]:
        actions: list[Action] = []
        if self._groups.get((fragment, version), group) != group:
            self._open = {k: e for k, e in self._open.items() if not _of(k, fragment, version)}
            self._closed = {k for k in self._closed if not _of(k, fragment, version)}
            actions.append(Discard(fragment, version))
        self._versions[fragment] = version
        self._groups[(fragment, version)] = group
        oldest = version - self._keep
        for key in [k for k in self._open if k.fragment == fragment and k.round < oldest]:
            del self._open[key]
        self._closed = {k for k in self._closed if k.fragment != fragment or k.round >= oldest}
        self._groups = {
            at: group for at, group in self._groups.items() if at[0] != fragment or at[1] >= oldest
        }
        return [*actions, Prune(fragment, oldest)]

    def _close_if_due(self, key: ShardKey, now: float) -> list[Action]:
        entry = self._open[key]
        group = self._groups.get((key.fragment, key.round))
        if entry.computing or not entry.contributors or group is None:
            return []
        expected = self._expected(key, group)
        awaited = expected - entry.contributors
        if awaited:
            enough = math.ceil(self._config.quorum * len(expected | entry.contributors))
            if len(entry.contributors) < enough:
                entry.quorum_at = None
                return []
            if entry.quorum_at is None:
                entry.quorum_at = now
            grace_s = self._config.grace_s + self._transfer_s[key.fragment]
            if now < entry.quorum_at + grace_s:
                return []
        entry.computing = True
        next_group = {
            peer
            for peer in self._view.joinable() | entry.contributors
            if self._view.live(peer) or peer == self._me
        }
        return [Compute(key, tuple(sorted(entry.contributors)), tuple(sorted(next_group)))]


def _of(key: ShardKey, fragment: int, round_: int) -> bool:
    return (key.fragment, key.round) == (fragment, round_)
