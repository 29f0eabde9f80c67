"""What the peers of a run say of themselves, asked over this peer's own connections."""

import asyncio
from collections.abc import Iterable

from protos import murmuration_pb2 as pb
from worker import wire
from worker.membership import Member
from worker.transport import Transport, TransportError

_PEER_S = 1.5  # for one peer's answer
_AT_ONCE = 16


async def ask_peers(
    members: Iterable[Member], transport: Transport, only: str = ""
) -> dict[str, bytes]:
    """The status of each that answers in time, or one key of it, packed. io thread only."""
    places = asyncio.Semaphore(_AT_ONCE)
    request = pb.StatusRequest(only=only).SerializeToString()

    async def ask(member: Member) -> tuple[str, bytes] | None:
        async with places:
            try:
                answer = await transport.call(
                    member.address, "Control/Status", request, _PEER_S, member.peer
                )
                return member.peer, wire.parse(pb.StatusReply, answer).document
            except (TransportError, wire.WireError):
                return None

    return dict(filter(None, await asyncio.gather(*map(ask, members))))
