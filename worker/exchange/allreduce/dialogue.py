"""The messages of a mean round, and the ranges of its shards.

contributor                                  reducer
    | ContributionHeader ----------------------> |  redirects, refuses, or takes it
    | <---------------- resume, from which offset |  (only where an earlier try was broken)
    | frames of the contribution --------------> |  ... until everyone has contributed
    | <---------------------------- ReductionHeader |
    | <-------------------- frames of the reduction |

A stream that begins with a CheckRequest is of `checks`.
"""

from dataclasses import dataclass
from typing import Literal

from murmuration.worker.exchange.view import ShardKey

Group = tuple[str, ...]

# `run`: another run; `group`, `pruned`: the sender must repair its state first; `invalid`: it does
# not fit; `again`: trying again helps.
RefusalKind = Literal["run", "group", "pruned", "invalid", "again"]


@dataclass(frozen=True, kw_only=True)
class ContributionHeader:
    """What begins a contribution.

    Args:
        group: hash of the group that lays out the round.
        codec: wire id.
        elements, total_bytes: of the shard; encoded.
        hash: of the whole encoded shard.
        weight: what the values count in the mean.
        norm: of the whole fragment's contribution, before it is encoded; 0 where norms are not
            compared.
        reduction_offset: bytes of the reduction that an earlier try has brought.
        resumed: an earlier try at this reducer may have left bytes there.
        root: of the values and the weight (`wire.Commitment`); empty where means are not checked.
    """

    run: int
    fragment: int
    round: int
    shard: int
    sender: str
    group: int
    codec: int
    elements: int
    total_bytes: int
    hash: int
    weight: int = 1
    norm: float = 0.0
    reduction_offset: int = 0
    resumed: bool = False
    root: bytes = b""

    @property
    def key(self) -> ShardKey:
        return ShardKey(self.fragment, self.round, self.shard)


@dataclass(frozen=True)
class ReductionHeader:
    """What begins a reduction.

    Args:
        joiners: peers to be in the next group beside those that contribute; of one shard a round.
        last: the peer whose contribution came last.
        factors: how far each contributor counts, where the norm limit has scaled one.
        reducer: the peer that has computed it, which may not be the one that gives it.
        roots, weights: of the contributors, as announced; no weights where all are 1.
    """

    contributors: Group
    joiners: Group
    codec: int
    total_bytes: int
    hash: int
    last: str
    factors: tuple[float, ...] = ()
    reducer: str = ""
    roots: tuple[bytes, ...] = ()
    weights: tuple[int, ...] = ()

    def factor(self, peer: str) -> float:
        """How far the peer's contribution counts; 0 where it does not."""
        factors = self.factors or (1.0,) * len(self.contributors)
        return dict(zip(self.contributors, factors, strict=True)).get(peer, 0.0)


@dataclass(frozen=True)
class Redirect:
    """Another peer is to reduce the shard."""

    peer: str


@dataclass(frozen=True)
class Refusal:
    """Why a contribution is not taken; `faulty`: what was sent does not fit."""

    kind: RefusalKind
    reason: str
    faulty: bool = False


@dataclass(frozen=True)
class ShardRange:
    """One shard of a fragment: its values from `start` to `stop`, and their encoded sizes; `exact`
    of the last are limbs of integers."""

    start: int
    stop: int
    contribution_bytes: int
    reduction_bytes: int
    exact: int = 0

    @property
    def bounds(self) -> tuple[int, int]:
        return self.start, self.stop
