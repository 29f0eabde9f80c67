"""Fetching and serving committed states: how a joiner starts, and a peer heals."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest

from murmuration.algorithms.fragment_state import FragmentState
from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker import wire
from murmuration.worker.background import Offload
from murmuration.worker.catchup.held_states import REMEMBERED, HeldStates
from murmuration.worker.membership import Member
from murmuration.worker.membership.swim import MAX_MEMBERS
from murmuration.worker.training.mailbox import Published
from murmuration.worker.transport import Method, Stream, Transport, TransportError

CHUNK_BYTES = 16 << 20  # that one of several donors gives at once
_CONFIRM_S = 3.0
_NEXT_S = 10.0


async def serve_states(
    stream: Stream, run: int, published: Published | None, held: HeldStates
) -> None:
    """Answers Fetches with what this peer has committed as the stream begins, if anything."""
    raw = await stream.receive()
    with suppress(TimeoutError):
        while raw is not None and published is not None:
            request = wire.parse(pb.FetchRequest, raw)
            if request.run != run:
                return
            await _answer(stream, request, published, held)
            async with asyncio.timeout(_NEXT_S):
                raw = await stream.receive()


async def _answer(
    stream: Stream, request: pb.FetchRequest, published: Published, held: HeldStates
) -> None:
    if len(request.fragments) > len(published.states) * (REMEMBERED if request.versions else 1):
        raise wire.WireError(f"{len(request.fragments)} fragments of {len(published.states)}")
    if request.versions:
        for index, version in zip(request.fragments, request.versions, strict=False):
            received = held.received(index, version)
            known = pb.StateHeader(
                fragment=index,
                version=version,
                hash=held.hash_of(index, version),
                sources=[source for _, source, _ in received],
                reductions=[hash_ for *_, hash_ in received],
            )
            await stream.send(pb.FetchReply(header=known).SerializeToString())
        return
    asked = (request.fragments, request.hashes, request.offsets, request.lengths)
    for index, hash_, offset, length in zip_longest(*asked):
        if index is None or index >= len(published.states):
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
            history=wire.history_to_message(state.history),
        )
        await stream.send(pb.FetchReply(header=header).SerializeToString())
        begin = offset or 0 if hash_ == state.hash else 0
        if length is not None:
            end = begin + length if hash_ == state.hash else 0
            parts = [parts[0][:end], parts[1][: max(0, end - len(parts[0]))]]
        for message, _ in wire.frame_messages(pb.FetchReply, parts, begin):
            await stream.send(message)


async def fetch_states(
    transport: Transport,
    donor: Member,
    run: int,
    expected: Mapping[int, tuple[int, int]],
    offload: Offload,
    silent_s: float = 40.0,
    begun: dict[int, wire.Incoming] | None = None,
    helpers: Sequence[Member] = (),
) -> tuple[int, dict[int, FragmentState]]:
    """Fetches fragments from one peer, which says what states these are, and from others that have
    the same. Returns (where a joiner goes on in the schedule, verified states by fragment). Raises
    TransportError, TimeoutError, WireError: nothing was taken. Args: helpers: as many as there are
    chunks at most; expected: by fragment, the number of values of its anchor and of its momentum;
    silent_s: until a donor that sends nothing is given up; begun: by fragment, what has arrived,
    also from other donors: what is left there if the link breaks, for the next to go on with."""
    streams = [transport.open(each.address, Method.FETCH, each.peer) for each in (donor, *helpers)]
    stream, begun = streams[0], {} if begun is None else begun
    try:
        order = sorted(expected)
        arrived = [begun.get(index) or wire.Incoming(0, 0) for index in order]
        request = pb.FetchRequest(
            run=run,
            fragments=order,
            offsets=[each.received_bytes for each in arrived],
            hashes=[each.hash for each in arrived],
            lengths=[0 for _ in order if helpers],
        )
        await stream.send(request.SerializeToString())
        if not helpers:
            await stream.done()
        headers: dict[int, pb.StateHeader] = {}
        for index in order:
            headers[index] = (await _next(stream, silent_s)).header
            _check_header(headers[index], index, expected[index], begun)
            while not (helpers or begun[index].complete):
                begun[index].add((await _next(stream, silent_s)).frame)
        if helpers:
            await _share_out(streams, run, {index: begun[index] for index in order}, silent_s)
        states = {
            index: await _state(headers[index], begun[index], expected[index], offload)
            for index in order
        }
        return headers[order[-1]].step, states
    except wire.WireError:
        begun.clear()  # whoever it was that sent a part which does not fit
        raise
    finally:
        for each in streams:
            each.cancel()


async def _share_out(
    streams: Sequence[Stream], run: int, begun: Mapping[int, wire.Incoming], silent_s: float
) -> None:
    """Has each donor give chunks until all are here. One that is free gives the chunk that was
    asked for longest ago: nothing waits for a slow one. Raises TransportError: some are missing."""
    chunks = [
        (index, begin, whole.part(begin, min(begin + CHUNK_BYTES, whole.total_bytes)))
        for index, whole in begun.items()
        for begin in range(whole.received_bytes, whole.total_bytes, CHUNK_BYTES)
    ]
    missing = {chunk: index for index, _, chunk in chunks}

    async def give(stream: Stream) -> None:
        with suppress(TransportError, TimeoutError, wire.WireError):  # it has broken off
            while missing:
                chunk, index = next(iter(missing.items()))
                missing[chunk] = missing.pop(chunk)  # the last one to be asked for
                begin, end = chunk.received_bytes, chunk.total_bytes
                part, ask = chunk.part(begin, end), {"offsets": [begin], "lengths": [end - begin]}
                request = pb.FetchRequest(run=run, fragments=[index], hashes=[part.hash], **ask)
                await stream.send(request.SerializeToString())
                if (await _next(stream, silent_s)).header.hash != part.hash:
                    return  # it has gone on
                while not part.complete:
                    part.add((await _next(stream, silent_s)).frame)
                    if chunk not in missing:
                        return  # another was faster
                    chunk.received_bytes = max(chunk.received_bytes, part.received_bytes)
                del missing[chunk]
            for each in giving:
                each.cancel()

    giving: list[asyncio.Task[None]] = []
    async with asyncio.TaskGroup() as group:
        giving += [group.create_task(give(each)) for each in streams]
    for index, begin, chunk in chunks:
        if begun[index].received_bytes == begin:
            begun[index].received_bytes = chunk.received_bytes
    if missing:
        raise TransportError(f"{len(missing)} of {len(chunks)} chunks are missing")


async def headers_at(
    transport: Transport, donor: Member, run: int, asked: Sequence[tuple[int, int]]
) -> list[pb.StateHeader]:
    """Headers of each (fragment, version), of hash 0 if not known; none without an answer."""
    if not asked:
        return []
    stream = transport.open(donor.address, Method.FETCH, donor.peer)
    try:
        fragments, versions = zip(*asked, strict=True)
        request = pb.FetchRequest(run=run, fragments=fragments, versions=versions)
        await stream.send(request.SerializeToString())
        await stream.done()
        async with asyncio.timeout(_CONFIRM_S):
            return [(await _next(stream, _CONFIRM_S)).header for _ in asked]
    except (TimeoutError, TransportError, wire.WireError):
        return []
    finally:
        stream.cancel()


async def _next(stream: Stream, silent_s: float) -> pb.FetchReply:
    try:
        async with asyncio.timeout(silent_s):
            raw = await stream.receive()
    except TimeoutError as error:
        raise TimeoutError(f"the donor has sent nothing for {silent_s:.0f} s") from error
    if raw is None:
        raise TransportError("the donor has nothing more to give")
    return wire.parse(pb.FetchReply, raw)


def _check_header(
    header: pb.StateHeader, index: int, sizes: tuple[int, int], begun: dict[int, wire.Incoming]
) -> None:
    """Checks a header; its state arrives in `begun`. Raises WireError."""
    total_bytes = 4 * sum(sizes)
    if header.fragment != index or header.total_bytes != total_bytes:
        raise wire.WireError(
            f"fragment {header.fragment} of {header.total_bytes} bytes; "
            f"expected {index} of {total_bytes}"
        )
    group = header.group
    if max(len(group), header.contributors) > MAX_MEMBERS or len({*group}) < len(group):
        raise wire.WireError(f"fragment {index}: a group of {len(group)} peers, or one twice")
    for name in group:
        wire.check_name(name)
    incoming = begun.get(index)
    if incoming is None or (incoming.hash, incoming.total_bytes) != (header.hash, total_bytes):
        begun[index] = wire.Incoming(total_bytes, header.hash)


async def _state(
    header: pb.StateHeader, incoming: wire.Incoming, sizes: tuple[int, int], offload: Offload
) -> FragmentState:
    """Makes a state of what has arrived. Raises WireError: it does not fit together."""
    index, group = header.fragment, tuple(header.group)
    history = wire.history_from_message(header.history, sizes[0], MAX_MEMBERS)
    anchor, momentum = wire.split_state(incoming.raw, sizes)
    if await offload(lambda: wire.state_hash(anchor, momentum, group)) != header.hash:
        raise wire.WireError(f"fragment {index} is damaged: its hash differs")
    if not await offload(lambda: wire.is_finite(anchor) and wire.is_finite(momentum)):
        raise wire.WireError(f"fragment {index} holds NaN, Inf or absurdly large values")
    known = (header.version, header.contributors, group, anchor, momentum, header.hash)
    return FragmentState(*known, history=history)
