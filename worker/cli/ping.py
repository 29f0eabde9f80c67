"""`murmur ping`: by which path a peer is reached, how long a call takes, and at which rate."""

import asyncio
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from murmuration.protos.addresses import split_address, split_relayed
from murmuration.protos.events import address_in
from murmuration.protos.exit_codes import ExitCode
from murmuration.worker.errors import PeersUnreachable, UsageError
from murmuration.worker.identity import Identity
from murmuration.worker.transport import Method

if TYPE_CHECKING:
    from murmuration.worker.transport.grpc import GrpcTransport

_CALL_S = 5.0
_BULK_CALLS, _BULK_BYTES = 16, 60_000  # calls, six at a time, and bytes of each
_AT_ONCE = 6


@dataclass(frozen=True)
class Pinged:
    """Args:
    path: `direct`, or the relays that lead to it.
    connect_ms: the first call, with all that a new connection takes.
    round_trips_ms: of small calls after it.
    rate_mbps: of `bytes_sent`, at once.
    """

    address: str
    path: str
    connect_ms: float
    round_trips_ms: list[float]
    bytes_sent: int
    rate_mbps: float


@click.command()
@click.argument("target", metavar="PEER|HOST:PORT")
@click.option("--from", "knows", metavar="HOST:PORT", help="Ask this peer where PEER is.")
@click.option(
    "--run",
    type=click.Path(path_type=Path, file_okay=False),
    help="Use the certificate of the worker of this folder; that worker may know PEER.",
)
@click.option(
    "--count", type=click.IntRange(1, 100), default=5, show_default=True, help="The round trips."
)
@click.option("--json", "as_json", is_flag=True, help="Print all figures as JSON.")
def ping(target: str, knows: str | None, run: Path | None, count: int, as_json: bool) -> int:
    """Measure the way from this machine to a peer: path, round trips, rate.

    PEER is a name that --from knows, or an address as `murmur status` shows it, such as
    w3@192.0.2.7:7700 for a relayed peer. The exit code is 6 if it does not answer.
    """
    identity = None if run is None else Identity.load(run)
    if run is not None and identity is None:
        raise UsageError(f"--run {run}: there is no certificate of a worker in that folder")
    knows = knows or (None if run is None else address_in(run))
    pinged = asyncio.run(_ping(target, knows, identity, count))
    if as_json:
        click.echo(json.dumps(asdict(pinged)))
        return ExitCode.DONE
    trips = sorted(pinged.round_trips_ms)
    click.echo(f"path         {pinged.path}, {pinged.address}")
    click.echo(f"first call   {pinged.connect_ms:.1f} ms, with the connection")
    middle = trips[len(trips) // 2]
    click.echo(
        f"round trips  {middle:.1f} ms in the middle of {len(trips)}, "
        f"{trips[0]:.1f} to {trips[-1]:.1f} ms"
    )
    click.echo(f"rate         {pinged.rate_mbps:.1f} Mbit/s for {pinged.bytes_sent / 1e6:.2f} MB")
    return ExitCode.DONE


async def _ping(target: str, knows: str | None, identity: Identity | None, count: int) -> Pinged:
    """Raises UsageError, PeersUnreachable, IdentityError."""
    from murmuration.protos.reach import CHECK_ADDRESS, ENCRYPTED_RUN
    from murmuration.worker.identity import IdentityError, is_encrypted_run
    from murmuration.worker.relay.tunnels import Tunnels
    from murmuration.worker.transport import TransportError, Untrusted
    from murmuration.worker.transport.grpc import GrpcTransport

    transport = GrpcTransport("127.0.0.1:0", security=identity)
    tunnels = Tunnels(transport, identity.name if identity else "", time.monotonic)
    transport.tunnel = tunnels.port
    asked = target if ":" in target else knows or ""
    try:
        return await measured(transport, await _address(transport, target, knows), count)
    except TransportError as error:
        if isinstance(error, Untrusted):
            if identity is None and await asyncio.to_thread(is_encrypted_run, asked):
                raise IdentityError(f"{asked}: {ENCRYPTED_RUN}") from error
            if not error.closed:
                raise IdentityError(str(error)) from error
        relays = "; ".join(f"{relay}: {why}" for relay, why in tunnels.problems.items())
        told = f" ({relays})" if relays else ""
        raise PeersUnreachable(f"{error}{told}; {CHECK_ADDRESS}") from error
    finally:
        await tunnels.close()
        await transport.close()


async def _address(transport: "GrpcTransport", target: str, knows: str | None) -> str:
    """Raises UsageError: not known; TransportError."""
    from murmuration.protos import murmuration_pb2 as pb
    from murmuration.protos.documents import STATUS_BYTES
    from murmuration.worker import wire

    if ":" in target:
        relays = (target,) if (through := split_relayed(target)) is None else through[1]
        for each in relays:
            try:
                split_address(each)
            except ValueError as error:
                raise UsageError(str(error)) from error
        return target
    if knows is None:
        raise UsageError(f"{target!r}: name a peer that knows it, with --from HOST:PORT")
    request = pb.StatusRequest().SerializeToString()
    raw = await transport.call(knows, Method.STATUS, request, _CALL_S)
    status = wire.unpack_document(wire.parse(pb.StatusReply, raw).document, STATUS_BYTES)
    addresses = {str(each["peer"]): str(each["address"]) for each in status.get("members", [])}
    if target not in addresses:
        raise UsageError(f"{target!r}: {knows} knows {', '.join(sorted(addresses)) or 'nobody'}")
    return addresses[target]


async def measured(transport: "GrpcTransport", address: str, count: int) -> Pinged:
    """Round trips and rate, by calls that a peer answers and forgets. Raises TransportError."""
    from murmuration.protos import murmuration_pb2 as pb

    through = split_relayed(address)
    peer = None if through is None else through[0]

    async def call(request: bytes) -> float:
        began = time.monotonic()
        await transport.call(address, Method.MEASURE, request, _CALL_S, peer)
        return 1000 * (time.monotonic() - began)

    small = pb.MeasureRequest().SerializeToString()
    connect_ms = await call(small)
    trips = [await call(small) for _ in range(count)]
    bulk = pb.MeasureRequest(payload=bytes(_BULK_BYTES)).SerializeToString()
    places = asyncio.Semaphore(_AT_ONCE)

    async def send() -> None:
        async with places:
            await call(bulk)

    began = time.monotonic()
    await asyncio.gather(*(send() for _ in range(_BULK_CALLS)))
    sent = _BULK_CALLS * len(bulk)
    return Pinged(
        address=address,
        path="direct" if through is None else f"relayed by {' or '.join(through[1])}",
        connect_ms=round(connect_ms, 3),
        round_trips_ms=[round(each, 3) for each in trips],
        bytes_sent=sent,
        rate_mbps=round(8e-6 * sent / (time.monotonic() - began), 3),
    )
