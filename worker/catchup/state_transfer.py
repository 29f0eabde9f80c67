"""Fetching and serving committed states: how a joiner starts, and a peer heals."""

from collections.abc import Mapping, Sequence

from algorithms.fragment_state import FragmentState
from protos import murmuration_pb2 as pb
from worker import wire
from worker.exchange.context import Offload
from worker.training.inbox import Published
from worker.transport import Stream, Transport, TransportError


async def serve_states(stream: Stream, run: int, published: Published | None) -> None:
    """Answers one Fetch with what this peer has committed; with nothing when there is nothing."""
    raw = await stream.receive()
    request = wire.parse(pb.FetchRequest, raw or b"")
    if published is None or request.run != run:
        return
    for index in request.fragments:
        if index >= len(published.states):
            raise wire.WireError(f"fragment {index} of {len(published.states)}")
        state = published.states[index]
        parts = wire.state_parts(state.anchor, state.momentum)
        header = pb.StateHeader(
            fragment=index,
            version=state.version,
            contributors=state.contributors,
            group=state.group,
            total_bytes=sum(map(len, parts)),
            hash=state.hash,
            step=published.entry_step,
        )
        await stream.send(pb.FetchReply(header=header).SerializeToString())
        for message, _ in wire.frame_messages(pb.FetchReply, parts):
            await stream.send(message)


async def fetch_states(
    transport: Transport,
    address: str,
    run: int,
    expected: Mapping[int, tuple[int, int]],
    offload: Offload,
) -> tuple[int, dict[int, FragmentState]]:
    """Fetches fragments from one peer.

    Args:
        expected: by fragment, the number of values of its anchor and of its momentum.

    Returns:
        (where a joiner goes on in the schedule, states by fragment), each verified by its hash.

    Raises:
        TransportError, WireError: nothing was taken.
    """
    stream = transport.open(address, "Data/Fetch")
    try:
        request = pb.FetchRequest(run=run, fragments=sorted(expected))
        await stream.send(request.SerializeToString())
        await stream.done()
        states: dict[int, FragmentState] = {}
        step = 0
        for index in sorted(expected):
            header, state = await _receive(stream, index, expected[index], offload)
            states[index], step = state, header.step
        return step, states
    finally:
        stream.cancel()


async def _receive(
    stream: Stream, index: int, sizes: tuple[int, int], offload: Offload
) -> tuple[pb.StateHeader, FragmentState]:
    raw = await stream.receive()
    if raw is None:
        raise TransportError("the donor has nothing to give")
    header = wire.parse(pb.FetchReply, raw).header
    total_bytes = 4 * sum(sizes)
    if header.fragment != index or header.total_bytes != total_bytes:
        raise wire.WireError(
            f"fragment {header.fragment} of {header.total_bytes} bytes; "
            f"expected {index} of {total_bytes}"
        )
    incoming = wire.Incoming(total_bytes, header.hash)
    while not incoming.complete:
        raw = await stream.receive()
        if raw is None:
            raise TransportError(f"fragment {index} broke off at {incoming.received_bytes}")
        incoming.add(wire.parse(pb.FetchReply, raw).frame)
    anchor, momentum = wire.split_state(incoming.buffer, sizes)
    group = tuple(header.group)
    if await offload(lambda: wire.state_hash(anchor, momentum, group)) != header.hash:
        raise wire.WireError(f"fragment {index} is damaged: its hash differs")
    return header, FragmentState(
        version=header.version,
        contributors=header.contributors,
        group=group,
        anchor=anchor,
        momentum=momentum,
        hash=header.hash,
    )


def sizes_of(states: Sequence[FragmentState]) -> dict[int, tuple[int, int]]:
    """By fragment, how many values its anchor and momentum have."""
    return {i: (s.anchor.numel(), s.momentum.numel()) for i, s in enumerate(states)}
