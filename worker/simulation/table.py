"""What a small group has put on the table in a simulated round."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from worker.exchange.pairwise import round as machine
from worker.exchange.pairwise.round import PairRound
from worker.simulation.network import Stream
from worker.simulation.swarm import Group

ANCHOR, CONTRIBUTION = "anchor", "contribution"


@dataclass(eq=False)
class Table:
    """One round as one of its peers sees it.

    Args:
        failed: why.
        complete: everything is here.
        met: partners whose contribution is on its way, or here.
        coming: by partner, since when its latest part arrives, and what of it was here (bytes).
        held: by partner and part, bytes that are here.
        anchors, contributions: by peer, this one's included, what is here.
        declined: partners that have given the round up, and why.
    """

    round: int
    group: Group
    meeting: PairRound | None = None
    succeeded: bool = False
    failed: str = ""
    complete: bool = False
    left: bool = False
    met: set[int] = field(default_factory=set)
    coming: dict[int, tuple[float, float]] = field(default_factory=dict)
    held: dict[tuple[int, str], float] = field(default_factory=dict)
    anchors: dict[str, Tensor] = field(default_factory=dict)
    contributions: dict[str, Tensor] = field(default_factory=dict)
    declined: dict[int, str] = field(default_factory=dict)
    streams: dict[int, Stream] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        return self.succeeded or bool(self.failed)

    def received(self, partner: int, sizes: Mapping[str, int]) -> bool:
        """Whether all of the partner's parts are here, which are of so many bytes."""
        return all(self.held.get((partner, part), 0.0) >= size for part, size in sizes.items())

    def seen(self, sizes: Mapping[str, int]) -> Iterator[machine.Event]:
        """What has happened so far, of which the machine has seen nothing."""
        for name in self.group:
            number = int(name[1:])
            if number in self.met:
                yield machine.Met(name)
            if self.received(number, sizes):
                yield machine.Received(name)
            if number in self.declined:
                yield machine.Declined(name, self.declined[number])
