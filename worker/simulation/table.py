"""What a small group has put on the table in a simulated round."""

from dataclasses import dataclass, field

from torch import Tensor

from worker.rounds import Meeting
from worker.simulation.network import Stream
from worker.simulation.swarm import Group

ANCHOR, GRADIENT = "anchor", "gradient"


@dataclass(eq=False)
class Table:
    """One round as one of its peers sees it.

    Args:
        failed: why.
        complete: everything is here.
        met: partners whose pseudo-gradient is on its way, or here.
        held: by partner and part, bytes that are here.
        declined: partners that have given the round up, and why.
    """

    round: int
    group: Group
    meeting: Meeting | None = None
    succeeded: bool = False
    failed: str = ""
    complete: bool = False
    left: bool = False
    met: set[int] = field(default_factory=set)
    held: dict[tuple[int, str], float] = field(default_factory=dict)
    values: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    declined: dict[int, str] = field(default_factory=dict)
    streams: dict[int, Stream] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        return self.succeeded or bool(self.failed)
