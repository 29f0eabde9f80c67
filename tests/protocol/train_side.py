"""A trainer's thread that takes turns with the event loop: only one of the two ever runs."""

import asyncio
import contextvars
import math
import threading
from collections.abc import Callable

from murmuration.worker.leases.ledger import LeaseMessage
from murmuration.worker.simulation.virtual_loop import VirtualLoop
from murmuration.worker.training.mailbox import Mailbox, Stop, ToIO, ToTrain


class Unwind(BaseException):
    """Ends a trainer's thread from outside."""


class TrainSide(Mailbox):
    """Runs `work` on a thread of its own, but only while the loop stands still for it."""

    def __init__(self, loop: VirtualLoop, context: contextvars.Context) -> None:
        super().__init__()
        self.ended = False
        self.error: BaseException | None = None
        self._loop, self._context = loop, context
        self._reporter: list[ToIO] = []
        self._deliver_to: Callable[[ToIO], None] = lambda _: None
        self._go, self._back = threading.Lock(), threading.Lock()  # each is held but for a turn
        self._go.acquire()
        self._back.acquire()
        self._wake_at = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._waits = self._unwinding = False
        self._thread: threading.Thread | None = None
        self.connect(self._reporter.append)

    # loop

    def start(self, work: Callable[[], None], deliver: Callable[[ToIO], None]) -> None:
        self._deliver_to = deliver
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()
        self._loop.call_soon(self._turn, context=self._context)

    def answer(self, message: ToTrain | LeaseMessage) -> None:
        super().answer(message)
        if self._waits:
            self._waits = False
            if self._timer is not None:
                self._timer.cancel()
            self._loop.call_soon(self._turn, context=self._context)

    def unwind(self) -> None:
        """Ends the thread wherever it is."""
        if self._thread is not None and not self.ended:
            self._unwinding = True
            self._go.release()
            self._thread.join()

    def _turn(self) -> None:
        """Lets the thread run until it sleeps, waits or ends."""
        if self.ended:
            return
        self._waits, self._timer, self._wake_at = False, None, math.inf
        self._go.release()
        self._back.acquire()
        posted, self._reporter[:] = list(self._reporter), []
        for message in posted:
            self._deliver_to(message)
        if not self.ended and self._wake_at < math.inf:
            self._timer = self._loop.call_at(self._wake_at, self._turn, context=self._context)

    def left(self) -> list[ToIO]:
        """The messages that were posted since the thread has ended."""
        posted, self._reporter[:] = list(self._reporter), []
        return posted

    # thread

    def wait(self, timeout_s: float | None = None) -> ToTrain | None:
        deadline = math.inf if timeout_s is None else self._loop.time() + timeout_s
        while (message := self.poll()) is None and self._loop.time() < deadline:
            self._waits, self._wake_at = True, deadline
            self._pause()
        return message

    def wait_lease(self) -> LeaseMessage | Stop:
        while self._to_share.empty():
            self._waits = True
            self._pause()
        return super().wait_lease()

    def computes(self, seconds: float) -> None:
        """Takes virtual time."""
        self._wake_at = self._loop.time() + seconds
        self._pause()

    def _pause(self) -> None:
        self._back.release()
        self._go.acquire()
        if self._unwinding:
            raise Unwind

    def _run(self, work: Callable[[], None]) -> None:
        self._go.acquire()
        try:
            if not self._unwinding:
                work()
        except Unwind:
            pass
        except BaseException as error:
            self.error = error
        self.ended = True
        self._back.release()
