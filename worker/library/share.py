"""A share of the samples that no other peer has: what `swarm.shard` gives to a loop, and to a task
where `[task] data` is `leased`.

A stream of samples is leased in blocks (`worker.leases`). There are three kinds: a `DataLoader`
over a data set with indices, whose order may be random; any sequence; and whatever else can be
iterated, which every peer reads from the front.
"""

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, TypeVar
from weakref import ref

from torch.utils.data import DataLoader

from murmuration.worker.errors import UsageError
from murmuration.worker.leases import LeasedBlocks, SampleStream
from murmuration.worker.leases.ledger import LeaseMessage, ShareMessage
from murmuration.worker.library.samples import Indexed, indexed
from murmuration.worker.tasks import Batch, Cursor, SharesSamples, TaskError
from murmuration.worker.training.replica import RunIsOver
from murmuration.worker.wire import hash64

T = TypeVar("T")

MOST_SAMPLES, LEAST_BLOCKS = 1024, 128  # of a block, and of an epoch
_UNKNOWN_LENGTH = 8  # batches of a block where nobody knows the length


class Shares:
    """The streams that this process draws from. train thread only.

    Args:
        seed: of random orders, the same on every peer.
        rank, ranks: of a site: each rank takes as much as the others.
        post: to the I/O thread.
        receive: the next message of a stream, for which it waits; None when the run ends.
    """

    def __init__(
        self,
        seed: int,
        rank: int,
        ranks: int,
        post: Callable[[ShareMessage], None],
        receive: Callable[[int], LeaseMessage | None],
    ) -> None:
        self._seed, self._rank, self._ranks = seed, rank, ranks
        self._post, self._receive = post, receive
        self._is_over = False
        self._openings = itertools.count()
        self._sources: dict[int, ref[Any]] = {}
        self._open: dict[int, LeasedBlocks] = {}

    def share(
        self, source: Iterable[T], name: str, block: int | None, over: Callable[[], bool]
    ) -> Iterator[T]:
        """Batches, or items, that no other peer has, until the epoch ends, or the run is over.

        Args:
            name: tells streams apart that are as long.
            block: samples (of other things than a `DataLoader`: items) in a block.

        Raises:
            UsageError: `block` is below 1, the stream is another's, or the same order on every
                peer cannot be had.
        """
        if block is not None and block < 1:
            raise UsageError(f"block={block}: at least one sample is leased at once")
        samples = indexed(source, self._seed)
        if samples is None:
            mark = _mark_of_passes(source)
            return self._in_order(source, self._stream(source, name, None, mark, block), over)
        stream = self._stream(source, name, len(samples), samples.mark, block)
        return self._by_index(samples, stream, over)

    def batches(self, task: SharesSamples, cursor: Cursor) -> Generator[Batch]:
        """A task's batches that no other peer has, epoch after epoch.

        Args:
            cursor: counts the samples that are drawn here.

        Raises:
            TaskError: its loader has no batch, or does not know how many.
            RunIsOver: instead of ending.
        """
        loader = task.loader()
        try:
            batches = len(loader)
        except TypeError as error:
            raise TaskError(f"the task's loader() must have a length: {error}") from error
        if not batches:
            raise TaskError("the task's loader() has no batch: give it more samples")
        while not self._is_over:
            try:
                drawn = self.share(loader, "", None, lambda: False)
            except UsageError as error:
                why = str(error).removeprefix("swarm.shard: ")
                raise TaskError(f"the task's loader(): {why}") from error
            for inputs, targets in drawn:
                cursor = cursor.advance(len(targets))
                yield Batch(inputs, targets, cursor)
        raise RunIsOver

    def tell(self) -> None:
        """Tells what is used."""
        for blocks in self._open.values():
            blocks.tell()

    # --------------------------------------------------------------------------------- inside

    def _stream(
        self, source: Any, name: str, length: int | None, mark: str, block: int | None
    ) -> SampleStream:
        if block is None:
            known = length is not None
            block = max(1, min(MOST_SAMPLES, (length or 0) // LEAST_BLOCKS))
            block = block if known else _UNKNOWN_LENGTH
        stream = SampleStream(
            hash64(f"{name}/{length}/{block}/{mark}".encode()), block, length, length is None, name
        )
        held = getattr(source, "dataset", source)
        before = self._sources.get(stream.id)
        if before is not None and before() is not None and before() is not held:
            raise UsageError(
                f"swarm.shard: two sets of data of {length} samples would share one epoch; give "
                "each a name: swarm.shard(loader, name='validation')"
            )
        try:
            self._sources[stream.id] = ref(held)
        except TypeError:  # a list has no weak references
            self._sources.pop(stream.id, None)
        return stream

    def _opened(self, stream: SampleStream, at_once: int, again: bool = False) -> LeasedBlocks:
        def receive() -> LeaseMessage | None:
            message = self._receive(stream.id)
            self._is_over = message is None
            return message

        if before := self._open.get(stream.id):
            before.abandon()
        whole = at_once * self._ranks
        blocks = LeasedBlocks(stream, whole, self._post, receive, next(self._openings), again)
        self._open[stream.id] = blocks
        return blocks

    def _closed(self, blocks: LeasedBlocks) -> None:
        """Unless it was opened again since."""
        if self._open.get(blocks.stream.id) is blocks:
            del self._open[blocks.stream.id]
            blocks.close()

    def _by_index(
        self, samples: Indexed[T], stream: SampleStream, over: Callable[[], bool]
    ) -> Iterator[T]:
        blocks = self._opened(stream, samples.batch)
        sizes: deque[int] = deque()

        def places() -> Iterator[list[Any]]:
            """Of this rank: a batch in each turn."""
            whole = samples.batch * self._ranks
            while runs := blocks.take(whole):
                chosen = [place for run in runs for place in samples.places(run, stream)]
                short = len(chosen) < whole
                if short and (self._ranks > 1 or samples.drop_last):
                    return  # what is left over goes back
                sizes.append(len(chosen))
                mine = slice(self._rank * samples.batch, (self._rank + 1) * samples.batch)
                yield chosen[mine]

        try:
            for batch in samples.load(places()):
                if over():
                    return
                blocks.use(sizes.popleft())
                yield batch
        finally:
            self._closed(blocks)

    def _in_order(
        self, source: Iterable[T], stream: SampleStream, over: Callable[[], bool]
    ) -> Iterator[T]:
        again = False
        while True:
            blocks = self._opened(stream, 1, again)
            try:
                for item in self._one_pass(iter(source), blocks):
                    if over():
                        return
                    blocks.use(self._ranks)
                    yield item
            finally:
                self._closed(blocks)
            again = blocks.passed_over and self._ranks == 1 and iter(source) is not source
            if not again:
                return

    def _one_pass(self, items: Iterator[T], blocks: LeasedBlocks) -> Iterator[T]:
        """Each peer reads all, and leaves out what is not its own."""
        numbered, at, size = enumerate(items, 1), 0, blocks.stream.block
        while runs := blocks.take(self._ranks):
            group: list[T] = []
            for run in runs:
                first = run.block.place * size
                while at < first + run.end:
                    if (found := next(numbered, None)) is None:
                        blocks.end_epoch(run, at)
                        break
                    at, item = found
                    if at > first + run.begin:
                        group.append(item)
            if len(group) == self._ranks:
                yield group[self._rank]


def _mark_of_passes(source: Any) -> str:
    """What the items depend on that are read from the front: batches, and the order of workers."""
    if not isinstance(source, DataLoader):
        return ""
    return f"{source.batch_size}/{source.drop_last}/{source.num_workers}"
