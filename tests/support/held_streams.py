"""Streams that hold as much of a worker as it lets them: nobody reads or ends them."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, repeat

import grpc
from grpc import aio

from murmuration.worker.identity import Identity
from tests.support.workers import PATIENCE_S

_PACKAGE = "/murmuration.v1."


@dataclass
class Held:
    """What became of the streams."""

    open: int = 0
    refusals: list[str] = field(default_factory=list)


async def hold_streams(
    address: str,
    identity: Identity | None,
    method: str,
    messages: Sequence[bytes],
    *,
    count: int,
    left: int,
    quiet_s: float = 2.0,
    connections: int = 25,
) -> tuple[Held, list[asyncio.Task[None]]]:
    """Opens the streams over several connections. Each sends the messages, the last again and
    again, and reads nothing. Returns when no more are open than are to be left, and when then
    nothing has been taken for `quiet_s`; the tasks hold the streams until they are cancelled.
    """
    held, changed = Held(count), asyncio.Event()
    channels = [channel_of(address, identity) for _ in range(connections)]

    async def fill(call: "aio.StreamStreamCall[bytes, bytes]") -> None:
        for message in chain(messages, repeat(messages[-1]) if messages else ()):
            await call.write(message)
            changed.set()

    async def hold(channel: aio.Channel) -> None:
        call = channel.stream_stream(_PACKAGE + method)(None)
        filling = asyncio.create_task(fill(call))
        try:
            code, said = await call.code(), await call.details()
            held.open -= 1
            held.refusals.append(f"{code.name}: {said}")
            changed.set()
        finally:
            filling.cancel()
            call.cancel()
            await asyncio.gather(filling, return_exceptions=True)

    tasks = [asyncio.create_task(hold(channels[n % connections])) for n in range(count)]
    async with asyncio.timeout(PATIENCE_S):
        while held.open > left:
            changed.clear()
            await changed.wait()
    with suppress(TimeoutError):
        while True:
            changed.clear()
            async with asyncio.timeout(quiet_s):
                await changed.wait()
    return held, tasks


def channel_of(address: str, identity: Identity | None) -> aio.Channel:
    options = [
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_send_message_length", -1),
    ]
    if identity is None:
        return aio.insecure_channel(address, options=options)
    credentials = grpc.ssl_channel_credentials(
        identity.authority, identity.key, identity.certificate
    )
    name = ("grpc.ssl_target_name_override", identity.server_name(None))
    return aio.secure_channel(address, credentials, options=[*options, name])
