"""Streams that hold as much of a worker as it lets them: nobody reads or ends them."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Any

from grpc import aio

from murmuration.worker.identity.certificates import Identity
from tests.support.stranger import channel_of
from tests.support.workers import PATIENCE_S

_PACKAGE = "/murmuration.v1."


async def released(tasks: Sequence["asyncio.Task[None]"]) -> None:
    """Ends what these hold."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def beside(work: Callable[[threading.Event], Coroutine[Any, Any, None]]) -> Iterator[None]:
    """Runs it on a loop of its own until it returns, which it does once the event is set."""
    ended = threading.Event()
    holding = threading.Thread(target=lambda: asyncio.run(work(ended)))
    holding.start()
    try:
        yield
    finally:
        ended.set()
        holding.join()


@dataclass
class Held:
    """The streams that stayed open, and how others were refused."""

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
    nothing has been taken for `quiet_s`; the tasks hold the streams until they are cancelled."""
    held, changed = Held(count), asyncio.Event()
    channels = [channel_of(address, identity, aio) for _ in range(connections)]

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
