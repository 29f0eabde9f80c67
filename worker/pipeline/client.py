"""A visit asked of another peer: activations there, their gradient back."""

from contextlib import suppress

from protos import murmuration_pb2 as pb
from worker import wire
from worker.exchange.context import Tasks
from worker.membership import Member
from worker.pipeline.config import Dropped, Elsewhere
from worker.pipeline.context import StageContext
from worker.pipeline.profile import Measuring
from worker.pipeline.stage_call import Back, StageCall
from worker.transport import Stream, TransportError
from worker.wire.visits import visit_header


async def call_visit(
    context: StageContext,
    member: Member,
    visit: StageCall,
    values: memoryview,
    measuring: Measuring,
    thanks: Tasks,
) -> Back:
    """Returns the gradient of `values` (encoded), however long the rest of the route takes.

    Args:
        thanks: where a last message goes out in the background.

    Raises:
        TransportError, WireError, Elsewhere: not by this peer; another may.
        Dropped: the microbatch is lost.
    """
    payload = wire.Payload.of(values)
    stream = context.transport.open(member.address, "Data/Visit")
    try:
        with measuring.transfer() as transfer:
            began = context.clock()
            await stream.send(visit_header(visit, context.run, context.codec, payload))
            for message, _, _ in wire.payload_messages(pb.VisitUp, payload):
                await stream.send(message)
            first = await _message(stream)
            seconds = context.clock() - began
        if first.HasField("taken"):
            if not first.taken.waited:
                measuring.sent(member.peer, len(values), seconds, alone=transfer.alone)
            first = await _message(stream)
        back = await _gradient(stream, _header(first, len(values)))
    except BaseException:
        stream.cancel()
        raise
    thanks.spawn(_end(stream))
    return back


async def _end(stream: Stream) -> None:
    """Says that the gradient is here. A link that breaks now takes nothing away any more."""
    try:
        with suppress(TransportError):
            await stream.send(pb.VisitUp(taken=pb.Taken()).SerializeToString())
            await stream.done()
            await stream.receive()
    finally:
        stream.cancel()


def _header(first: pb.VisitDown, expected_bytes: int) -> pb.Gradient:
    if first.HasField("failed"):
        raise (Elsewhere if first.failed.elsewhere else Dropped)(first.failed.reason)
    header = first.gradient
    if header.total_bytes != expected_bytes:
        raise wire.WireError(f"a gradient of {header.total_bytes} bytes, not {expected_bytes}")
    return header


async def _gradient(stream: Stream, header: pb.Gradient) -> Back:
    incoming = wire.Incoming(header.total_bytes, header.hash)
    while not incoming.complete:
        incoming.add((await _message(stream)).frame)
    incoming.verify()
    return Back(incoming.buffer, tuple(header.path))


async def _message(stream: Stream) -> pb.VisitDown:
    raw = await stream.receive()
    if raw is None:
        raise TransportError("the visit broke off")
    return wire.parse(pb.VisitDown, raw)
