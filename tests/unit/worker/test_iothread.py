"""The I/O thread as the train thread sees it."""

import threading
from typing import Any, cast

import pytest

from worker.iothread import IOThread
from worker.training.inbox import Mailbox, Stop


class FailsAtOnce:
    """A node that ends with an error as soon as it listens."""

    async def listen(self) -> str:
        return "h:1"

    async def run(self) -> None:
        raise ValueError("nobody came")

    def close(self) -> None:
        """Nothing is left to end."""


class SlowMailbox(Mailbox):
    """Takes the word of the end only when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.told, self.goes_on = threading.Event(), threading.Event()

    def answer(self, message: object) -> None:
        self.told.set()
        self.goes_on.wait()
        super().answer(cast(Any, message))


def test_to_close_what_is_just_ending_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loop is closed then, and its thread still alive."""
    mailbox = SlowMailbox()
    io = IOThread(cast(Any, FailsAtOnce), mailbox)
    assert io.start() == "h:1"
    mailbox.told.wait()
    join = io._thread.join

    def joined(timeout: float) -> None:
        mailbox.goes_on.set()
        join(timeout)

    monkeypatch.setattr(io._thread, "join", joined)
    try:
        io.close()
    finally:
        mailbox.goes_on.set()
    stopped = mailbox.wait()
    assert isinstance(stopped, Stop)
    assert stopped.reason == "nobody came"
