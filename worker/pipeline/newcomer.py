"""Which stage a newcomer serves: the one with the least throughput, as a peer there sees it."""

import asyncio
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress

from algorithms.skippipe.assignment import stage_to_join
from protos import murmuration_pb2 as pb
from protos.documents import STATUS_BYTES
from worker import wire
from worker.errors import PeersUnreachable
from worker.pipeline.config import StagesConfig
from worker.transport import Transport, TransportError
from worker.transport.grpc import GrpcTransport

_ASK_S = 5.0
_MOST_ASKED = 3


def stage_to_serve(address: str, stages: StagesConfig, proxy: str | None = None) -> int:
    """Asks a peer, or by way of a coordinator one, who serves what. Raises PeersUnreachable."""
    try:
        members = asyncio.run(members_at(GrpcTransport("127.0.0.1:0", proxy), address))
    except (TransportError, wire.WireError) as error:
        raise PeersUnreachable(
            f"{address} does not say who serves which stage: {error}; choose one with --stage"
        ) from error
    return slowest_stage(members, stages)


def slowest_stage(members: Sequence[object], stages: StagesConfig) -> int:
    """The stage whose live members do the fewest visits per second of those that it gets.

    Who has not measured its speed counts as the median of those that have: where nobody has, the
    stage with the fewest replicas. The first of equals.

    Args:
        members: of a status document.
    """
    serving: list[list[float]] = [[] for _ in range(stages.count)]
    for member in members:
        if not isinstance(member, Mapping) or member.get("health") not in ("alive", "suspect"):
            continue
        stage, speed = member.get("stage"), member.get("visits_per_s")
        if isinstance(stage, int) and 0 <= stage < stages.count:
            serving[stage].append(speed if isinstance(speed, int | float) and speed > 0 else 0.0)
    known = [speed for each in serving for speed in each if speed]
    usual = statistics.median(known) if known else 1.0
    totals = [sum(speed or usual for speed in each) for each in serving]
    # Stage 0 is in all routes, the others are in their share of them.
    share = (stages.rules(1).visited - 1) / max(1, stages.count - 1)
    return stage_to_join([totals[0], *(total / share for total in totals[1:])])


async def members_at(transport: Transport, address: str) -> Sequence[object]:
    """As a peer knows them: a coordinator, which does not measure, only says whom to ask.

    Closes the transport. Raises TransportError, WireError.
    """
    try:
        document = await _status(transport, address)
        members = _listed(document)
        if isinstance(document, Mapping) and document.get("kind") == "coordinator":
            there = [m for m in members if isinstance(m, Mapping) and m.get("health") == "alive"]
            for member in there[:_MOST_ASKED]:
                with suppress(TransportError, wire.WireError):
                    if told := _listed(await _status(transport, str(member.get("address")))):
                        return told
        return members
    finally:
        await transport.close()


def _listed(document: object) -> Sequence[object]:
    members = document.get("members") if isinstance(document, Mapping) else None
    return members if isinstance(members, list) else []


async def _status(transport: Transport, address: str) -> object:
    request = pb.StatusRequest().SerializeToString()
    raw = await transport.call(address, "Control/Status", request, _ASK_S)
    return wire.unpack_document(wire.parse(pb.StatusReply, raw).document, STATUS_BYTES)
