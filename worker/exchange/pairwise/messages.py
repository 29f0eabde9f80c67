"""Messages and values of pair rounds as they travel: wire form, codecs, checks and means."""

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from algorithms.codecs import Codec, codec_by_name
from algorithms.diloco import mean_in_order
from algorithms.plan import Plan
from protos import murmuration_pb2 as pb
from worker import wire
from worker.exchange.arrivals import Arrival
from worker.exchange.context import Context
from worker.exchange.pairwise.stream import (
    ANCHOR,
    CONTRIBUTION,
    CheckPart,
    Message,
    PairBuffer,
    PairHeader,
    PairPart,
    PairStaged,
    PairStream,
    PartForm,
    PartHeader,
    PartProgress,
    PartValid,
    Refusal,
    RefusalKind,
    StreamEvent,
    Unfit,
)

if TYPE_CHECKING:
    from torch import Tensor

_CODES = {
    RefusalKind.RUN: pb.RefusalCode.REFUSAL_RUN,
    RefusalKind.GROUP: pb.RefusalCode.REFUSAL_GROUP,
    RefusalKind.PRUNED: pb.RefusalCode.REFUSAL_PRUNED,
    RefusalKind.AGAIN: pb.RefusalCode.REFUSAL_AGAIN,
    RefusalKind.INVALID: pb.RefusalCode.REFUSAL_INVALID,
}
_KINDS = {code: kind for kind, code in _CODES.items()}


def encoded(message: Message) -> bytes:
    """The message as it travels."""
    match message:
        case PairHeader():
            assert isinstance(message.group, int), "groups travel as hashes"
            header = pb.PairHeader(
                run=message.run,
                fragment=message.fragment,
                round=message.round,
                sender=message.sender,
                group=message.group,
                held=[pb.Held(hash=hash_, offset=offset) for hash_, offset in message.held],
            )
            return pb.PairMessage(header=header).SerializeToString()
        case PartHeader():
            part = pb.PartHeader(**asdict(message))
            return pb.PairMessage(part=part).SerializeToString()
        case PairStaged():
            return pb.PairMessage(staged=pb.Staged()).SerializeToString()
        case Refusal(kind, reason):
            refusal = pb.Refusal(code=_CODES[kind], reason=reason)
            return pb.PairMessage(refusal=refusal).SerializeToString()


def own_part(payload: wire.Payload, left_out: "Tensor | None", weight: int = 1) -> PairPart:
    """A part that this peer gives.

    Args:
        left_out: what the encoding of its values has, None for nothing.
    """
    return PairPart(payload.hash, len(payload.raw), weight, values=(payload, left_out))


def payload_of(own: PairPart) -> wire.Payload:
    """What travels of a part of this peer's own."""
    payload, _ = _own_values(own)
    return payload


def left_out(own: PairPart | None) -> "Tensor | None":
    """What the encoding of a part of this peer's own has left out; None of none."""
    return None if own is None else _own_values(own)[1]


def _own_values(own: PairPart) -> "tuple[wire.Payload, Tensor | None]":
    assert isinstance(own.values, tuple), "a part of this peer's own"
    payload, rest = own.values
    return payload, rest


def _incoming(part: PairPart) -> wire.Incoming:
    """What has arrived of a partner's part."""
    if part.values is None:
        part.values = wire.Incoming(part.total_bytes, part.hash)
    assert isinstance(part.values, wire.Incoming), "a part of a partner's"
    return part.values


class PairValues:
    """Turns what partners send into events, and what they have given into means.

    Args: context: plan, sizes, counters.
    """

    def __init__(self, context: Context) -> None:
        self._context = context

    def codec(self, part: int) -> Codec:
        """The wire codec of a part."""
        return codec_of(self._context.plan, part)

    def forms(self, fragment: int) -> tuple[PartForm, PartForm]:
        """How the parts of a fragment travel."""
        elements, exact = self._context.elements[fragment], self._context.limbs(fragment)
        anchor, contribution = (
            PartForm(codec.wire_id, codec.name, wire.encoded_bytes(codec, elements, exact))
            for codec in (self.codec(ANCHOR), self.codec(CONTRIBUTION))
        )
        return anchor, contribution

    def event(self, stream: PairStream, raw: bytes, arrival: Arrival) -> StreamEvent:
        """What a message is to the machine; a frame's bytes are taken on the way."""
        try:
            message = wire.parse(pb.PairMessage, raw)
            match message.WhichOneof("body"):
                case "header":
                    return _header(message.header)
                case "part":
                    arrival.ends()
                    arrival.begins(stream.peer)
                    return self._part_header(message.part)
                case "frame":
                    return self._frame(stream, message.frame, arrival)
                case "staged":
                    return PairStaged()
                case "refusal":
                    kind = _KINDS.get(message.refusal.code, RefusalKind.INVALID)
                    return Refusal(kind, message.refusal.reason)
                case _:
                    reason = "an empty message; a pair round must begin with its header"
                    return Unfit(again=False, reason=reason)
        except wire.WireError as error:
            return Unfit(isinstance(error, wire.Again), str(error))

    async def checked(self, check: CheckPart) -> PartValid | Unfit:
        """Whether a part that is complete is what it should be."""
        assert check.stream.buffer is not None, "parts belong to a round"
        fragment = check.stream.buffer.fragment
        elements, exact = self._context.elements[fragment], self._context.limbs(fragment)
        codec, incoming = self.codec(check.index), _incoming(check.part)
        try:
            incoming.verify()
            await self._context.worked(
                elements,
                lambda: wire.check_values(codec, incoming.buffer, elements, exact=exact),
            )
        except wire.WireError as error:
            return Unfit(isinstance(error, wire.Again), str(error), check.part)
        return PartValid(check.part)

    async def mean_anchor(self, buffer: PairBuffer) -> "Tensor":
        """As it has arrived everywhere, with what the own anchor's encoding left out: each keeps
        that, so nothing of all anchors' mean is lost, and small steps add up."""
        mean, rest = await self.mean(buffer, ANCHOR), left_out(buffer.own[ANCHOR])
        return mean if rest is None else mean.add_(rest)

    async def mean(self, buffer: PairBuffer, index: int) -> "Tensor":
        """Of a part of all peers of the round."""
        codec, elements = self.codec(index), self._context.elements[buffer.fragment]
        parts, own = buffer.parts(index, self._context.me), buffer.own[index]
        payloads = [payload_of(p).raw if p is own else _incoming(p).buffer for p in parts]
        weights = [part.weight for part in parts] if index == CONTRIBUTION else None
        mean_of = partial(mean_in_order, weights=weights)
        exact = self._context.limbs(buffer.fragment)
        return await self._context.worked(
            len(payloads) * elements,
            lambda: wire.average(codec, payloads, elements, mean_of, exact=exact),
        )

    async def anchor(self, fragment: int, anchor: "Tensor") -> PairPart:
        """As it goes to partners. Raises ValueError: not for the codec."""
        codec, exact = self.codec(ANCHOR), self._context.limbs(fragment)
        lossy = codec.name != "fp32"
        return own_part(*await self._context.encoded(codec, anchor, exact=exact, error=lossy))

    def _part_header(self, part: pb.PartHeader) -> PartHeader:
        weight = self._context.weight(part.weight) if part.part == CONTRIBUTION else 1
        return PartHeader(
            part=part.part,
            codec=part.codec,
            total_bytes=part.total_bytes,
            hash=part.hash,
            offset=part.offset,
            weight=weight,
        )

    def _frame(self, stream: PairStream, frame: pb.Frame, arrival: Arrival) -> PartProgress:
        if stream.arriving is None:
            raise wire.WireError(f"a frame of no part from {stream.peer}")
        incoming = _incoming(stream.arriving)
        size, stands_for = incoming.add(frame)
        codec = self.codec(stream.arriving_index)
        self._context.counts.contributions_received.add(size, stands_for, codec)
        arrival.came(size)
        if incoming.complete:
            arrival.ends()
        return PartProgress(incoming.received_bytes)


def codec_of(plan: Plan, part: int) -> Codec:
    """The wire codec of a part."""
    return codec_by_name(plan.anchor_codec if part == ANCHOR else plan.codec)


def _header(header: pb.PairHeader) -> PairHeader:
    return PairHeader(
        run=header.run,
        fragment=header.fragment,
        round=header.round,
        sender=header.sender,
        group=header.group,
        held=tuple((held.hash, held.offset) for held in header.held),
    )
