"""The I/O thread: one event loop that runs a node, beside the train thread."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from murmuration.worker.loopthread import LoopThread
from murmuration.worker.node import Node
from murmuration.worker.training.inbox import Mailbox, Stop, ToIO

_END_S = 10.0


class IOThread(LoopThread):
    """Runs a node."""

    def __init__(
        self,
        make: Callable[[], Node],
        mailbox: Mailbox,
        log: Callable[[dict[str, object]], None],
    ) -> None:
        super().__init__("murmur-io", log)
        self._make, self._mailbox = make, mailbox
        self._node: Node | None = None

    @property
    def node(self) -> Node:
        assert self._node is not None, "start() comes first"
        return self._node

    def start(self) -> str:
        """Returns the advertised address. Raises AddressInUse."""
        return super().start()

    def close(self) -> None:
        """Leaves the swarm and waits for the thread to end, if it was started."""
        if self._thread.ident is None:
            return
        if self._loop is not None and self._node is not None and self._thread.is_alive():
            with suppress(RuntimeError):  # it has ended meanwhile: its thread only says so yet
                self._loop.call_soon_threadsafe(self._node.close)
        self._thread.join(timeout=_END_S)

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

    def _on_failure(self, cause: BaseException) -> None:
        self._mailbox.answer(Stop(str(cause), cause))
