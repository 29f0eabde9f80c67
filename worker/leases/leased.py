"""The train thread's end of a leased stream: positions to draw, and those that are used."""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from murmuration.worker.leases import ledger
from murmuration.worker.leases.lease_table import LeaseTable


class Run(NamedTuple):
    """Positions in a row of one block: `begin` to `end` of the order of its epoch."""

    block: ledger.Block
    begin: int
    end: int

    @property
    def epoch(self) -> int:
        return self.block.epoch


class LeasedBlocks:
    """Positions of a stream that no other peer has. train thread only.

    Draw them with `take`, and say with `use`, in the same order, when they are given to the loop.
    The two may be apart, as where a `DataLoader` loads ahead.

    Args: at_once: positions that are mostly taken with one call. post: to the I/O thread; must not
    block. receive: waits for the next message of the stream; None when the run ends. opening,
    again, first: as in `LeaseTable.open_stream`."""

    def __init__(
        self,
        stream: ledger.SampleStream,
        at_once: int,
        post: Callable[[ledger.ShareMessage], None],
        receive: Callable[[], ledger.LeaseMessage | None],
        opening: int,
        again: bool = False,
        first: int = 0,
    ) -> None:
        self.stream, self._opening = stream, opening
        self.passed_over = False  # whether another pass over the stream would find something
        self._post, self._receive = post, receive
        self._most_unknown = max(stream.block, 2 * at_once)
        self._granted: deque[tuple[ledger.Block, int]] = deque()
        self._current: Run | None = None
        self._drawn: deque[Run] = deque()
        self._cursors: dict[ledger.Block, int] = {}
        self._done: list[ledger.Block] = []
        self._total = self._posted = self._known = 0
        self._lengths: dict[int, int] = {}  # of epochs whose end was found
        self._ended = self.run_is_over = False
        ahead = 1 + -(-at_once // stream.block)
        self._tell(lambda table: table.open_stream(stream, opening, ahead, again, first))

    def take(self, count: int) -> list[Run]:
        """The next `count` positions; fewer when nobody has any left to give."""
        runs: list[Run] = []
        while count and (current := self._current or self._next()) is not None:
            end = min(current.end, current.begin + count)
            runs.append(current._replace(end=end))
            count -= end - current.begin
            rest = current._replace(begin=end)
            self._current = rest if rest.begin < rest.end else None
        self._drawn += runs
        return runs

    def use(self, count: int) -> None:
        """The oldest `count` that were taken go to the loop next; the others hear of them when it
        comes back. Waits while nobody knows of more than a block (or twice `at_once`): a crash
        repeats that."""
        if 2 * (self._total + count - self._posted) >= self._most_unknown:
            self.tell()
        while self._total + count - self._known > self._most_unknown and not self.run_is_over:
            self._take_message()
        self._total += count
        while count:
            run = self._drawn.popleft()
            used = min(run.end - run.begin, count)
            count -= used
            if used < run.end - run.begin:
                self._drawn.appendleft(run._replace(begin=run.begin + used))
            self._advance(run.block, run.begin + used)

    def begin_with(self, epoch: int, item: int) -> None:
        """Others are told if theirs begins with another."""
        self._tell(lambda table: table.begin_with(self.stream, epoch, item))

    def end_epoch(self, run: Run, length: int) -> None:
        """The stream, whose length nobody knew, has ended where this run was to be read."""
        self._lengths[run.epoch] = length
        self._current = None
        fits = (each._replace(end=min(each.end, self._size(each.block))) for each in self._drawn)
        self._drawn = deque(each for each in fits if each.begin < each.end)
        self._granted = deque(each for each in self._granted if self._size(each[0]))
        size, block = self.stream.block, run.block
        first_missing = block.number - block.place + -(-length // size)
        if self._size(block) and all(each.block != block for each in self._drawn):
            self._advance(block, self._size(block))
        missing = block._replace(number=first_missing)
        self._tell(lambda table: table.end_epoch(missing))

    def tell(self) -> None:
        if self._total > self._posted or self._done:
            self._posted = self._total
            total, cursors, done = self._total, dict(self._cursors), tuple(self._done)
            self._tell(lambda table: table.use(self.stream.id, total, cursors, done))
            self._done.clear()

    def abandon(self) -> None:
        """Draws no more, since the stream was opened again."""
        self.tell()
        self._granted.clear()
        self._current, self._ended, self.run_is_over = None, True, True

    def close(self) -> None:
        self.tell()
        self._tell(lambda table: table.close_stream(self.stream.id))

    def _tell(self, tell: Callable[[LeaseTable], None]) -> None:
        self._post(ledger.ShareMessage(tell))

    def _next(self) -> Run | None:
        """The block to draw from next, which may be waited for."""
        while not self._granted:
            if self._ended:
                return None
            self.tell()
            self._tell(lambda table: table.starve(self.stream.id))
            self._take_message()
        block, begin = self._granted.popleft()
        self._tell(lambda table: table.begin_block(block))
        return Run(block, begin, self._size(block))

    def _take_message(self) -> None:
        message = self._receive()
        if message is not None and message.opening != self._opening:
            return  # late: of an earlier time
        match message:
            case ledger.BlockLeased(_, block, begin):
                self._granted.append((block, begin))
            case ledger.LeaseRevoked(_, block):
                self._granted = deque(each for each in self._granted if each[0] != block)
                if self._current is not None and self._current.block == block:
                    self._current = None
            case ledger.UseKnown(_, _, total):
                self._known = max(self._known, total)
            case ledger.Exhausted(_, _, behind):
                self._ended, self.passed_over = True, behind
            case None:
                self._ended = self.run_is_over = True

    def _size(self, block: ledger.Block) -> int:
        size = self.stream.size(block)
        if (length := self._lengths.get(block.epoch)) is not None:
            size = max(0, min(size, length - block.place * self.stream.block))
        return size

    def _advance(self, block: ledger.Block, used: int) -> None:
        if used < self._size(block):
            self._cursors[block] = used
            return
        self._cursors.pop(block, None)
        self._done.append(block)
