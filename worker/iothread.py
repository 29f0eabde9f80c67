"""The I/O thread: one event loop that runs a node, beside the train thread."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import TypeVar

from worker.node import Node
from worker.training.inbox import Mailbox, Stop, ToIO

T = TypeVar("T")


class IOThread:
    """Runs a node on an event loop of its own thread."""

    def __init__(self, make: Callable[[], Node], mailbox: Mailbox) -> None:
        self._make, self._mailbox = make, mailbox
        self._ready: concurrent.futures.Future[str] = concurrent.futures.Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._node: Node | None = None
        self._ended: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="murmur-io", daemon=True)

    @property
    def node(self) -> Node:
        assert self._node is not None, "start() comes first"
        return self._node

    def start(self) -> str:
        """Returns the advertised address. Raises AddressInUse."""
        self._thread.start()
        return self._ready.result()

    def ask(self, question: Callable[[], T]) -> T:
        """Calls a function on the loop's thread."""
        assert self._loop is not None
        answer: concurrent.futures.Future[T] = concurrent.futures.Future()

        def call() -> None:
            try:
                answer.set_result(question())
            except Exception as error:
                answer.set_exception(error)

        self._loop.call_soon_threadsafe(call)
        return answer.result(timeout=10)

    def do(self, work: Callable[[], Coroutine[None, None, T]], timeout_s: float) -> T:
        """Runs a coroutine on the loop. Raises TimeoutError."""
        assert self._loop is not None

        async def limited() -> T:
            async with asyncio.timeout(timeout_s):
                return await work()

        return asyncio.run_coroutine_threadsafe(limited(), self._loop).result()

    def close(self) -> None:
        """Leaves the swarm and waits for the thread to end, if it was started."""
        if self._thread.ident is None:
            return
        if self._loop is not None and self._node is not None and self._thread.is_alive():
            with suppress(RuntimeError):  # it has ended meanwhile: its thread only says so yet
                self._loop.call_soon_threadsafe(self._node.close)
        self._thread.join(timeout=10)

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:  # handed to the train thread, whatever it is
            cause = _first_cause(error)
            if not self._ready.done():
                self._ready.set_exception(cause)
            self._mailbox.answer(Stop(str(cause), cause))

    async def _main(self) -> None:
        loop = self._loop = asyncio.get_running_loop()
        node = self._node = self._make()
        address = await node.listen()

        def deliver(message: ToIO) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(node.deliver, message)

        self._mailbox.connect(deliver)
        self._ready.set_result(address)
        await node.run()


def _first_cause(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
