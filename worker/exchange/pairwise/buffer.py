"""What a peer holds of a round in pairs: its own parts, and as much of its partners' as is here."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from murmuration.worker import wire
from murmuration.worker.exchange.pairwise.round import PairRound

if TYPE_CHECKING:
    from torch import Tensor

    from murmuration.worker.exchange.pairwise.partner import PartnerStream

ANCHOR, CONTRIBUTION = PARTS = (0, 1)  # on the wire: PartHeader.part

Group = tuple[str, ...]


@dataclass(frozen=True, eq=False)
class OwnPart:
    """An anchor or a contribution that this peer gives.

    Args: left_out: what the encoding of its values has, None for nothing.
    """

    payload: wire.Payload
    left_out: "Tensor | None" = None
    weight: int = 1

    @property
    def hash(self) -> int:
        return self.payload.hash

    @property
    def raw(self) -> memoryview:
        return self.payload.raw


@dataclass(eq=False)
class TheirPart:
    """As much of a partner's anchor or contribution as is here; `checked`: all, and it is valid."""

    incoming: wire.Incoming
    weight: int = 1
    checked: bool = False

    @property
    def hash(self) -> int:
        return self.incoming.hash

    @property
    def raw(self) -> memoryview:
        return self.incoming.buffer


@dataclass(eq=False)
class PairBuffer:
    """One round as one of its peers sees it.

    Args:
        group: the peers of the round, this one included.
        own: by part, what this peer gives; the contribution comes when the round has begun.
        laid: when (s) the buffer was laid out.
    """

    fragment: int
    round: int
    group: Group
    own: dict[int, OwnPart]
    laid: float
    theirs: defaultdict[str, dict[int, TheirPart]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    staged: set[str] = field(default_factory=set)  # partners that hold everything
    declined: dict[str, str] = field(default_factory=dict)  # partners that have given up, and why
    complete: bool = False  # everything is here
    machine: PairRound | None = None  # from the beginning of the round
    began: float = 0.0
    succeeded: bool = False
    failed: str = ""  # why
    leave_at: float = 0.0  # when a round that is given up is left
    last: str = ""  # whose values came last
    heard: float = 0.0  # when bytes of a partner came last
    told: bool = False  # whether the train side has the anchors' mean, or is about to
    let_go: bool = False  # whether it knows that it need not wait for that
    streams: "dict[str, PartnerStream]" = field(default_factory=dict)
    recalls: dict[str, tuple[float, int]] = field(default_factory=dict)  # when, which attempt

    @property
    def key(self) -> tuple[int, int]:
        return self.fragment, self.round

    @property
    def name(self) -> str:
        return f"round {self.round} of fragment {self.fragment}"

    @property
    def ended(self) -> bool:
        return self.succeeded or bool(self.failed)

    @property
    def weight(self) -> int:
        """Of this peer's contribution."""
        contribution = self.own.get(CONTRIBUTION)
        return contribution.weight if contribution else 1

    def received(self, peer: str) -> bool:
        """Whether all of the partner's values are here, and valid."""
        parts = self.theirs[peer]
        return all(part in parts and parts[part].checked for part in PARTS)

    def holds_anchors(self, me: str) -> bool:
        """Whether every partner's anchor is here, and valid."""
        anchors = (self.theirs[peer].get(ANCHOR) for peer in self.group if peer != me)
        return all(anchor is not None and anchor.checked for anchor in anchors)

    def parts(self, part: int, me: str) -> list[OwnPart | TheirPart]:
        """A part of every peer, in the order of the group, which is sorted."""
        return [self.own[part] if peer == me else self.theirs[peer][part] for peer in self.group]
