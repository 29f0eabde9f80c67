"""The I/O thread as the train thread sees it."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest

from murmuration.worker import background
from murmuration.worker.training.mailbox import IOThread, Mailbox


class Stays:
    """A node that does nothing, until it is closed or fails."""

    deliver = None  # nothing is posted

    def __init__(self) -> None:
        self.ends = asyncio.Event()
        self.fails: Exception | None = None

    async def listen(self) -> str:
        return "h:1"

    async def run(self) -> None:
        await self.ends.wait()
        if self.fails is not None:
            raise self.fails

    def close(self) -> None:
        self.ends.set()

    def fail(self, error: Exception) -> None:
        self.fails = error
        self.ends.set()


@pytest.fixture
def warned() -> list[str]:
    return []


@pytest.fixture
def io(warned: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[IOThread]:
    """A thread whose patience is short."""
    monkeypatch.setattr(background, "_LOOK_S", 0.01)
    monkeypatch.setattr(background, "_LATE_S", 0.02)
    thread = IOThread(cast(Any, Stays), Mailbox(), lambda event: warned.append(str(event["text"])))
    thread.start()
    yield thread
    thread.close()


async def forever() -> None:
    await asyncio.Event().wait()


def busy(io: IOThread, goes_on: threading.Event) -> None:
    assert io._loop is not None
    io._loop.call_soon_threadsafe(goes_on.wait)


def test_an_answer_that_is_late_is_waited_for_and_told_once(io, warned):
    """As on a machine that is busy, or after SIGSTOP and SIGCONT."""
    for _ in range(2):
        goes_on = threading.Event()
        busy(io, goes_on)
        slow = threading.Timer(0.3, goes_on.set)
        slow.start()
        assert io.ask(lambda: 3) == 3
        slow.join()
    assert len(warned) == 1
    assert "murmur-io has not answered for " in warned[0]


def test_a_thread_that_ends_says_why(io):
    io.ask(lambda: cast(Any, io.node).fail(ValueError("the link is gone")))
    io._thread.join()
    for question in (lambda: io.ask(lambda: 3), lambda: io.do(io.node.listen)):
        with pytest.raises(RuntimeError, match=r"^murmur-io has ended: the link is gone$"):
            question()


def test_who_waits_for_a_thread_that_ends_is_told(io):
    """The loop ends before it has come to the question, or during the work."""
    goes_on = threading.Event()
    busy(io, goes_on)
    assert io._loop is not None
    io._loop.call_soon_threadsafe(lambda: cast(Any, io.node).fail(ValueError("gone")))
    threading.Timer(0.05, goes_on.set).start()
    with pytest.raises(RuntimeError, match=r"^murmur-io has ended: gone$"):
        io.do(forever)


def test_work_has_a_limit_where_it_is_given_one(io, warned):
    with pytest.raises(TimeoutError):
        io.do(forever, 0.1)
    assert warned == []  # work may take its time


async def test_what_a_question_raises_is_raised_here_and_a_running_loop_may_ask(io):
    with pytest.raises(KeyError):
        io.ask(lambda: {}["x"])
    assert io.ask(lambda: 3) == 3
