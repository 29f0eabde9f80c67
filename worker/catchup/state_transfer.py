"""Fetching and serving committed states: how a joiner starts, and a peer heals."""

import asyncio
from collections.abc import Mapping, Sequence

from murmuration.algorithms.fragment_state import FragmentState
from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker import wire
from murmuration.worker.background import Offload
from murmuration.worker.catchup.held_states import REMEMBERED, HeldStates
from murmuration.worker.membership import Digest, Member
from murmuration.worker.membership.swim import MAX_MEMBERS
from murmuration.worker.training.mailbox import Published
from murmuration.worker.transport import Method, Stream, Transport, TransportError

_CONFIRM_S = 3.0


async def serve_states(
    stream: Stream, run: int, published: Published | None, held: HeldStates
) -> None:
    """Answers one Fetch with what this peer has committed; with nothing when there is nothing."""
    raw = await stream.receive()
    request = wire.parse(pb.FetchRequest, raw or b"")
    if published is None or request.run != run:
        return
    if len(request.fragments) > (REMEMBERED if request.versions else len(published.states)):
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
    held_there = zip(request.fragments, request.hashes, request.offsets, strict=False)
    begun = {index: {hash_: offset} for index, hash_, offset in held_there}
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
            history=wire.history_to_message(state.history),
        )
        await stream.send(pb.FetchReply(header=header).SerializeToString())
        offset = begun.get(index, {}).get(state.hash, 0)
        for message, _ in wire.frame_messages(pb.FetchReply, parts, offset):
            await stream.send(message)


async def fetch_states(
    transport: Transport,
    donor: Member,
    run: int,
    expected: Mapping[int, tuple[int, int]],
    offload: Offload,
    begun: dict[int, wire.Incoming] | None = None,
) -> tuple[int, dict[int, FragmentState]]:
    """Fetches fragments from one peer.

    Args:
        expected: by fragment, the number of values of its anchor and of its momentum.
        begun: by fragment, what has arrived from other donors; what arrives now is left there if
            the link breaks, for the next to go on with.

    Returns:
        (where a joiner goes on in the schedule, states by fragment), each verified by its hash.

    Raises:
        TransportError, WireError: nothing was taken.
    """
    stream = transport.open(donor.address, Method.FETCH, donor.peer)
    begun = {} if begun is None else begun
    try:
        order = sorted(expected)
        arrived = [begun.get(index) or wire.Incoming(0, 0) for index in order]
        request = pb.FetchRequest(
            run=run,
            fragments=order,
            offsets=[each.received_bytes for each in arrived],
            hashes=[each.hash for each in arrived],
        )
        await stream.send(request.SerializeToString())
        await stream.done()
        states: dict[int, FragmentState] = {}
        step = 0
        for index in order:
            header, state = await _receive(stream, index, expected[index], offload, begun)
            states[index], step = state, header.step
        return step, states
    except wire.WireError:
        begun.clear()  # whoever it was that sent a part which does not fit
        raise
    finally:
        stream.cancel()


async def confirm_states(
    transport: Transport, donor: Member, run: int, states: Mapping[int, FragmentState | Digest]
) -> bool | None:
    """Asks a second peer for states that another has given.

    Returns:
        Whether it holds or has held all of them; None when it does not know some of them, or does
        not say.
    """
    asked = [(index, states[index].version) for index in sorted(states)]
    if not (headers := await headers_at(transport, donor, run, asked)):
        return None
    known = [
        theirs.hash == states[index].hash if theirs.hash else None
        for (index, _), theirs in zip(asked, headers, strict=True)
    ]
    return False if False in known else None if None in known else True


async def rounds_apart(
    transport: Transport,
    donor: Member,
    run: int,
    fragment: int,
    mine: FragmentState,
    held: HeldStates,
) -> int:
    """How many of the latest rounds in this state the donor never had: 0 for a peer that is only
    behind, or does not say; more where a partition has made two histories of one. At most as many
    as are remembered."""
    versions = held.versions(fragment, mine.version)[:REMEMBERED]
    for asked in (versions[:1], versions[1:]):  # nearly always the newest is one that it had
        headers = await headers_at(transport, donor, run, [(fragment, v) for v in asked])
        if len(headers) < len(asked):
            return 0
        for version, theirs in zip(asked, headers, strict=True):
            if theirs.hash == held.hash_of(fragment, version):
                return mine.version - version
    return mine.version - versions[-1] if versions else 0


async def headers_at(
    transport: Transport, donor: Member, run: int, asked: Sequence[tuple[int, int]]
) -> list[pb.StateHeader]:
    """What it knows of each (fragment, version): hash 0 is nothing; all of it is nothing where it
    does not say."""
    if not asked:
        return []
    stream = transport.open(donor.address, Method.FETCH, donor.peer)
    try:
        fragments, versions = zip(*asked, strict=True)
        request = pb.FetchRequest(run=run, fragments=fragments, versions=versions)
        await stream.send(request.SerializeToString())
        await stream.done()
        found: list[pb.StateHeader] = []
        async with asyncio.timeout(_CONFIRM_S):
            for _ in asked:
                raw = await stream.receive()
                if raw is None:
                    return []
                found.append(wire.parse(pb.FetchReply, raw).header)
        return found
    except (TimeoutError, TransportError, wire.WireError):
        return []
    finally:
        stream.cancel()


async def _receive(
    stream: Stream,
    index: int,
    sizes: tuple[int, int],
    offload: Offload,
    begun: dict[int, wire.Incoming],
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
    group = tuple(header.group)
    if max(len(group), header.contributors) > MAX_MEMBERS or len({*group}) < len(group):
        raise wire.WireError(f"fragment {index}: a group of {len(group)} peers, or one twice")
    for name in group:
        wire.check_name(name)
    history = wire.history_from_message(header.history, sizes[0], MAX_MEMBERS)
    incoming = begun.get(index)
    if incoming is None or (incoming.hash, incoming.total_bytes) != (header.hash, total_bytes):
        incoming = begun[index] = wire.Incoming(total_bytes, header.hash)
    while not incoming.complete:
        raw = await stream.receive()
        if raw is None:
            raise TransportError(f"fragment {index} broke off at {incoming.received_bytes}")
        incoming.add(wire.parse(pb.FetchReply, raw).frame)
    anchor, momentum = wire.split_state(incoming.buffer, sizes)
    if await offload(lambda: wire.state_hash(anchor, momentum, group)) != header.hash:
        raise wire.WireError(f"fragment {index} is damaged: its hash differs")
    if not await offload(lambda: wire.is_finite(anchor) and wire.is_finite(momentum)):
        raise wire.WireError(f"fragment {index} holds NaN, Inf or absurdly large values")
    return header, FragmentState(
        version=header.version,
        contributors=header.contributors,
        group=group,
        anchor=anchor,
        momentum=momentum,
        hash=header.hash,
        history=history,
    )


def sizes_of(states: Sequence[FragmentState]) -> dict[int, tuple[int, int]]:
    """By fragment, how many values its anchor and momentum have."""
    return {i: (s.anchor.numel(), s.momentum.numel()) for i, s in enumerate(states)}
