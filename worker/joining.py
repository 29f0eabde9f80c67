"""First contact with a swarm, before this peer knows what it trains."""

import asyncio
import time

from protos import murmuration_pb2 as pb
from worker import wire
from worker.errors import PeersUnreachable
from worker.manifest import Manifest
from worker.transport import Transport, TransportError
from worker.transport.grpc import GrpcTransport

_TRY_S = 3.0
_PAUSE_S = 0.25


def fetch_manifest(address: str, timeout_s: float) -> Manifest:
    """Asks a peer what its run is.

    Raises:
        PeersUnreachable: no answer within `timeout_s`; says what was tried.
    """
    return asyncio.run(_fetch(GrpcTransport("127.0.0.1:0"), address, timeout_s))


async def _fetch(transport: Transport, address: str, timeout_s: float) -> Manifest:
    deadline = time.monotonic() + timeout_s
    tries, problem = 0, ""
    try:
        while (left_s := deadline - time.monotonic()) > 0:
            tries += 1
            try:
                raw = await transport.call(
                    address,
                    "Control/Join",
                    pb.JoinRequest().SerializeToString(),
                    min(_TRY_S, left_s),
                )
                return Manifest.unpack(wire.parse(pb.JoinReply, raw).manifest)
            except (TransportError, wire.WireError) as error:
                problem = str(error)
                await asyncio.sleep(min(_PAUSE_S, max(0.0, left_s)))
    finally:
        await transport.close()
    raise PeersUnreachable(
        f"no peer answers at {address}: {tries} tries in {timeout_s:g} s, the last: {problem}; "
        "check the address, that a worker runs there, and that its port is open"
    )
