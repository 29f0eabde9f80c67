"""A visit asked of another peer: activations there, their gradient back."""

from protos import murmuration_pb2 as pb
from worker import wire
from worker.membership import Card
from worker.stages.context import StageContext
from worker.stages.errors import Dropped, Elsewhere
from worker.stages.profile import Measuring
from worker.stages.visit import Back, Visit
from worker.transport import Stream, TransportError
from worker.wire.visits import visit_header


async def call_visit(
    context: StageContext, card: Card, visit: Visit, values: memoryview, measuring: Measuring
) -> Back:
    """Returns the gradient of `values` (encoded), however long the rest of the route takes.

    Raises:
        TransportError, WireError, Elsewhere: not by this peer; another may.
        Dropped: the microbatch is lost.
    """
    payload = wire.Payload.of(values)
    stream = context.transport.open(card.address, "Data/Visit")
    try:
        await stream.send(visit_header(visit, context.run, context.codec, payload))
        for message, _, _ in wire.payload_messages(pb.VisitUp, payload):
            await stream.send(message)
        await stream.done()
        header = await _header(stream, len(values))
        began = context.clock()
        back = await _gradient(stream, header)
        measuring.arrived(card.peer, len(values), context.clock() - began)
        return back
    finally:
        stream.cancel()


async def _header(stream: Stream, expected_bytes: int) -> pb.Gradient:
    first = await _message(stream)
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
