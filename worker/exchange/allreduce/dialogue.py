"""What a contributor and a reducer say to each other, and the layout of a round that both know.

contributor                                  reducer
    | ContributionHeader ----------------------> |  redirects, refuses, or takes it
    | <---------------- resume, from which offset |  (only where an earlier try was broken)
    | frames of the contribution --------------> |  ... until everyone has contributed
    | <---------------------------- ReductionHeader |
    | <-------------------- frames of the reduction |
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from worker.exchange.types import ShardKey

if TYPE_CHECKING:
    from algorithms.codecs import Codec

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

    @property
    def key(self) -> ShardKey:
        return ShardKey(self.fragment, self.round, self.shard)


@dataclass(frozen=True)
class ReductionHeader:
    """What begins a reduction; `last` is the peer whose contribution came last."""

    contributors: Group
    next_group: Group
    codec: int
    total_bytes: int
    hash: int
    last: str


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


class RoundLayout(Protocol):
    """What all peers of a run compute alike from its settings and a group."""

    @property
    def run(self) -> int: ...

    @property
    def codec(self) -> "Codec":
        """Of contributions."""
        ...

    @property
    def reduction_codec(self) -> "Codec": ...

    @property
    def fragments(self) -> int:
        """How many there are."""
        ...

    def orders(self, fragment: int, group: Group) -> Sequence[Sequence[str]]:
        """By shard, the peers that may reduce it, best first."""
        ...

    def shards(self, fragment: int, group: Group) -> Sequence[ShardRange]: ...

    def group_hash(self, group: Group) -> int: ...

    def weight(self, announced: int) -> int:
        """What a contribution counts. Raises ValueError: more than any can."""
        ...

    def transfer_s(self, fragment: int) -> float:
        """How long a whole fragment takes on the slowest link that is planned for."""
        ...

    def round_s(self, fragment: int) -> float:
        """How long a round may take."""
        ...
