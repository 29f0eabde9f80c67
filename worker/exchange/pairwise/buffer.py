"""What a small group has put on the table in one round, as one of its peers sees it."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from algorithms.codecs import Codec, codec_by_name
from algorithms.plan import Plan
from protos import murmuration_pb2 as pb
from worker import wire
from worker.exchange.context import Context
from worker.exchange.pairwise import round as machine
from worker.exchange.pairwise.round import PairRound

if TYPE_CHECKING:
    import asyncio

    from torch import Tensor

ANCHOR, CONTRIBUTION = PARTS = (0, 1)  # on the wire: PartHeader.part


@dataclass(eq=False)
class PairBuffer:
    """Args:
    group: the peers of the round, this one included.
    own: by part, what this peer gives; the contribution comes when the round has begun.
    left_out: what the encoding of its anchor has, None for nothing.
    """

    fragment: int
    round: int
    group: tuple[str, ...]
    own: dict[int, wire.Payload]
    left_out: "Tensor | None" = None
    theirs: defaultdict[str, dict[int, wire.Incoming]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    staged: set[str] = field(default_factory=set)  # partners that hold everything
    declined: dict[str, str] = field(default_factory=dict)  # partners that have given up, and why
    complete: bool = False  # everything is here
    meeting: PairRound | None = None  # from the beginning of the round
    succeeded: bool = False
    failed: str = ""  # why
    began: float = 0.0
    last: str = ""  # whose values came last
    weight: int = 1  # of this peer's contribution
    error: "Tensor | None" = None
    laid: float = 0.0  # when
    heard: float = 0.0  # when bytes of a partner came last
    told: bool = False  # whether the train side has the anchors' mean, or is about to
    let_go: bool = False  # whether it knows that it need not wait for that
    checked: set[tuple[str, int]] = field(default_factory=set)  # partners' parts that are valid
    streams: dict[str, "asyncio.Task[None]"] = field(default_factory=dict)
    _arriving: dict[str, int] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        return self.succeeded or bool(self.failed)

    @property
    def name(self) -> str:
        return f"round {self.round} of fragment {self.fragment}"

    def header(self, context: Context, peer: str) -> bytes:
        """This peer's first message on a stream to the partner."""
        held = [
            pb.Held(hash=incoming.hash, offset=incoming.received_bytes)
            if (incoming := self.theirs[peer].get(part))
            else pb.Held()
            for part in PARTS
        ]
        header = pb.MeetHeader(
            run=context.run,
            fragment=self.fragment,
            round=self.round,
            sender=context.me,
            group=wire.group_hash(self.group),
            held=held,
        )
        return pb.MeetMessage(header=header).SerializeToString()

    def part_header(self, part: int, codec: Codec, offset: int) -> bytes:
        payload = self.own[part]
        header = pb.PartHeader(
            part=part,
            codec=codec.wire_id,
            total_bytes=len(payload.raw),
            hash=payload.hash,
            offset=offset,
            weight=self.weight,
        )
        return pb.MeetMessage(part=header).SerializeToString()

    def expect(
        self, peer: str, header: pb.PartHeader, codec: Codec, elements: int, weight: int
    ) -> None:
        """A part of the partner's begins, or goes on. Raises WireError: it does not fit."""
        expected = (codec.wire_id, codec.encoded_bytes(elements))
        if (header.codec, header.total_bytes) != expected:
            raise wire.WireError(
                f"{self.name} from {peer}: {header.total_bytes} bytes of codec {header.codec}; "
                f"expected {expected[1]} bytes of {codec.name}"
            )
        incoming = self.theirs[peer].get(header.part)
        if self.meeting is not None and incoming is not None and self.received(peer):
            # The round counts on what is here.
            if (header.hash, weight) != (incoming.hash, incoming.weight):
                raise wire.WireError(f"{self.name} from {peer}: other values than before")
        elif incoming is None or incoming.hash != header.hash or header.offset == 0:
            self.drop(peer, header.part)
            incoming = self.theirs[peer][header.part] = wire.Incoming(expected[1], header.hash)
        if header.offset != incoming.received_bytes:
            raise wire.Again(f"{self.name} from {peer}: goes on at {header.offset}")
        incoming.weight = weight
        self._arriving[peer] = header.part

    def arriving(self, peer: str) -> tuple[int, wire.Incoming]:
        """(part, payload) that the partner's frames belong to. Raises WireError: to none."""
        part = self._arriving.get(peer)
        if part is None or part not in self.theirs[peer]:
            raise wire.WireError(f"{self.name} from {peer}: a frame of no part")
        return part, self.theirs[peer][part]

    def unchecked(self, peer: str) -> list[tuple[int, wire.Incoming]]:
        """The partner's parts that are complete, but not known to be valid."""
        parts = self.theirs[peer].items()
        return [(p, each) for p, each in parts if each.complete and (peer, p) not in self.checked]

    def drop(self, peer: str, part: int) -> None:
        """Nothing of the part is kept."""
        self.theirs[peer].pop(part, None)
        self.checked.discard((peer, part))

    def holds(self, part: int, me: str) -> bool:
        """Whether every partner's part is here, and valid."""
        return all((peer, part) in self.checked for peer in self.group if peer != me)

    def received(self, peer: str) -> bool:
        """Whether all of the partner's values are here, and valid."""
        return all((peer, part) in self.checked for part in PARTS)

    def seen(self, me: str) -> list[machine.Event]:
        """What has happened before the round had begun here."""
        events: list[machine.Event] = []
        for peer in self.group:
            if CONTRIBUTION in self.theirs[peer]:
                events.append(machine.Met(peer))
            if self.received(peer):
                events.append(machine.Received(peer))
            if CONTRIBUTION in self.theirs[peer] and peer < me and peer not in self.streams:
                events.append(machine.Broken(peer, 0, f"{peer}: the stream broke off"))
            if peer in self.declined:
                events.append(machine.Declined(peer, self.declined[peer]))
        return events

    def payloads(self, part: int, me: str) -> tuple[list[memoryview], list[int]]:
        """(payload, weight) of all peers, in the order of the group, which is sorted."""
        theirs = {peer: self.theirs[peer][part] for peer in self.group if peer != me}
        own = self.own[part].raw
        return (
            [theirs[peer].buffer if peer in theirs else own for peer in self.group],
            [theirs[peer].weight if peer in theirs else self.weight for peer in self.group],
        )


def codec_of(plan: Plan, part: int) -> Codec:
    """The wire codec of a part."""
    return codec_by_name(plan.anchor_codec if part == ANCHOR else plan.codec)
