"""Which stage a newcomer serves: the one with the fewest replicas, as a peer there sees it."""

import asyncio
from collections.abc import Mapping, Sequence

from algorithms.skippipe.moving import stage_to_join
from protos import murmuration_pb2 as pb
from worker import wire
from worker.errors import PeersUnreachable
from worker.transport import TransportError
from worker.transport.grpc import GrpcTransport

_ASK_S = 5.0


def stage_to_serve(address: str, stages: int, proxy: str | None = None) -> int:
    """Asks a peer or a coordinator who serves what. Raises PeersUnreachable."""
    try:
        document = asyncio.run(_status(GrpcTransport("127.0.0.1:0", proxy), address))
    except (TransportError, wire.WireError) as error:
        raise PeersUnreachable(
            f"{address} does not say who serves which stage: {error}; choose one with --stage"
        ) from error
    members = document.get("members") if isinstance(document, Mapping) else None
    return least_served(members if isinstance(members, list) else [], stages)


def least_served(members: Sequence[object], stages: int) -> int:
    """The stage with the fewest live members of a status document; the first of equals."""
    serving = [0.0] * stages
    for member in members:
        if not isinstance(member, Mapping) or member.get("health") not in ("alive", "suspect"):
            continue
        stage = member.get("stage")
        if isinstance(stage, int) and 0 <= stage < stages:
            serving[stage] += 1
    return stage_to_join(serving)


async def _status(transport: GrpcTransport, address: str) -> object:
    request = pb.StatusRequest().SerializeToString()
    try:
        raw = await transport.call(address, "Control/Status", request, _ASK_S)
        return wire.unpack_document(wire.parse(pb.StatusReply, raw).document)
    finally:
        await transport.close()
