"""One relayed connection: bytes in both directions, at the pace that `shaping` decides."""

import asyncio
import itertools
import random
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress

from coordinator.links.shaping import Member, Pipe

_LEAST_SLEEP_S = 0.001  # shorter waits are made up for by the next one
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends RST
_number = itertools.count()


class Connection:
    """Between the member that opened it and the one it meant (None: someone outside).

    Args:
        client, server: connected, non-blocking sockets; the caller closes them after `run`.
        passable: returns once the link between two members is not cut.
        seed: of the jitter.
    """

    def __init__(
        self,
        member: Member,
        target: Member | None,
        client: socket.socket,
        server: socket.socket,
        passable: Callable[[Member | None, Member | None], Awaitable[None]],
        seed: float,
    ) -> None:
        self.number = next(_number)
        self._member, self._target = member, target
        self._client, self._server = client, server
        self._passable = passable
        self._seed = seed
        self._task: asyncio.Task[None] | None = None

    def touches(self, member: Member) -> bool:
        return member in (self._member, self._target)

    async def run(self) -> None:
        """Until both directions have ended, or one has failed."""
        chance = random.Random(self._seed)
        there = Pipe(self._member, self._target, chance)
        back = Pipe(self._target, self._member, chance)
        task = self._task = asyncio.create_task(self._both(there, back))
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait([task])
            raise
        if task.cancelled():
            self._reset()
        elif error := task.exception():
            self._reset()  # whoever is left must not take it for a regular end
            _raise_unless_lost(error)

    def break_off(self) -> None:
        """Both ends see a reset, as when a router in between has forgotten the connection."""
        if self._task is not None:
            self._task.cancel()

    # --------------------------------------------------------------------------------- inside

    async def _both(self, there: Pipe, back: Pipe) -> None:
        async with asyncio.TaskGroup() as group:
            for pipe, source, target in (
                (there, self._client, self._server),
                (back, self._server, self._client),
            ):
                way = _Way(pipe, source, target, self._clear)
                group.create_task(way.read())
                group.create_task(way.write())

    async def _clear(self) -> None:
        await self._passable(self._member, self._target)

    def _reset(self) -> None:
        for end in (self._client, self._server):
            with suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)


class _Way:
    """One direction: `read` and `write` run side by side, with what is under way between them."""

    def __init__(
        self,
        pipe: Pipe,
        source: socket.socket,
        target: socket.socket,
        clear: Callable[[], Awaitable[None]],
    ) -> None:
        self._pipe, self._source, self._target, self._clear = pipe, source, target, clear
        self._under_way: deque[tuple[float, bytes]] = deque()
        self._news = asyncio.Event()
        self._room = asyncio.Event()

    async def read(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._clear()
            chunk = await loop.sock_recv(self._source, self._pipe.chunk_bytes)
            more_s, due_s = self._pipe.enter(len(chunk), loop.time())
            self._under_way.append((due_s, chunk))
            self._news.set()
            if not chunk:
                return
            await _until(more_s)
            while self._pipe.full:
                self._room.clear()
                await self._room.wait()

    async def write(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while not self._under_way:
                self._news.clear()
                await self._news.wait()
            due_s, chunk = self._under_way.popleft()
            await _until(due_s)
            await self._clear()
            if not chunk:
                self._target.shutdown(socket.SHUT_WR)
                return
            await loop.sock_sendall(self._target, chunk)
            self._pipe.leave(len(chunk))
            self._room.set()


async def _until(when_s: float) -> None:
    wait_s = when_s - asyncio.get_running_loop().time()
    if wait_s >= _LEAST_SLEEP_S:
        await asyncio.sleep(wait_s)


def _raise_unless_lost(error: BaseException) -> None:
    """Either end may go away at any time; everything else is a defect."""
    rest = error.split(OSError)[1] if isinstance(error, BaseExceptionGroup) else error
    if rest is not None:
        raise rest
