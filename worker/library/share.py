"""A share of the samples that no other peer has: what `swarm.shard` gives to a loop, and to a task
where `[task] data` is `leased`.

A stream of samples is leased in blocks (`worker.leases`). There are three kinds: a `DataLoader`
over a data set with indices, whose order may be random; any sequence; and whatever else can be
iterated, which every peer reads from the front.
"""

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar
from weakref import ref

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from worker.errors import UsageError
from worker.leases import LeasedBlocks, Run, SampleStream
from worker.leases.types import LeaseMessage, ShareMessage
from worker.tasks import Batch, Cursor, SharesSamples, TaskError
from worker.training.replica import RunIsOver
from worker.wire import hash64

T = TypeVar("T")

_MOST_SAMPLES, _LEAST_BLOCKS = 1024, 128  # of a block, and of an epoch
_UNKNOWN_LENGTH = 8  # batches of a block where nobody knows the length
_KEPT = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
)


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
            UsageError: `block` is below 1, the stream is another's, or a loader's sampler has no
                length.
        """
        if block is not None and block < 1:
            raise UsageError(f"block={block}: at least one sample is leased at once")
        samples = _indexed(source, self._seed)
        if samples is None:
            return self._in_order(source, self._stream(source, name, None, block), over)
        return self._by_index(samples, self._stream(source, name, len(samples), block), over)

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
            for inputs, targets in self.share(loader, "", None, lambda: False):
                cursor = cursor.advance(len(targets))
                yield Batch(inputs, targets, cursor)
        raise RunIsOver

    def tell(self) -> None:
        """Tells what is used."""
        for blocks in self._open.values():
            blocks.tell()

    # --------------------------------------------------------------------------------- inside

    def _stream(
        self, source: Any, name: str, length: int | None, block: int | None
    ) -> SampleStream:
        if block is None:
            known = length is not None
            block = max(1, min(_MOST_SAMPLES, (length or 0) // _LEAST_BLOCKS))
            block = block if known else _UNKNOWN_LENGTH
        stream = SampleStream(
            hash64(f"{name}/{length}/{block}".encode()), block, length, length is None
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
        self, samples: "_Indexed[T]", stream: SampleStream, over: Callable[[], bool]
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


class _Indexed(Generic[T]):
    """Samples that can be drawn in any order.

    Args:
        order: of an epoch: what `load` takes, by position.
        batch: positions of a batch.
        drop_last: no batch is shorter.
        load: from what is drawn, batch by batch, to what the loop is given.
    """

    def __init__(
        self,
        length: int,
        order: Callable[[int], Sequence[Any] | Tensor],
        load: Callable[[Iterator[list[Any]]], Iterable[T]],
        batch: int = 1,
        drop_last: bool = False,
    ) -> None:
        self.load, self.batch, self.drop_last = load, batch, drop_last
        self._length, self._order = length, order
        self._orders: dict[int, Sequence[Any] | Tensor] = {}

    def __len__(self) -> int:
        return self._length

    def places(self, run: Run, stream: SampleStream) -> list[Any]:
        """What stands at these positions."""
        if run.epoch not in self._orders:
            self._orders = {e: o for e, o in self._orders.items() if e == run.epoch - 1}
            self._orders[run.epoch] = self._order(run.epoch)
        first = run.block.place * stream.block
        found = self._orders[run.epoch][first + run.begin : first + run.end]
        return found.tolist() if isinstance(found, Tensor) else list(found)


def _indexed(source: Iterable[T], seed: int) -> _Indexed[T] | None:
    """None for what can only be iterated."""
    if isinstance(source, DataLoader):
        return None if isinstance(source.dataset, IterableDataset) else _of_loader(source, seed)
    if isinstance(source, Sequence):
        items: Sequence[T] = source
        return _Indexed(
            len(items), lambda _: range(len(items)), lambda drawn: (items[i] for i, *_ in drawn)
        )
    return None


def _of_loader(loader: DataLoader[Any], seed: int) -> _Indexed[Any]:
    """A random order is replaced by one that follows from the seed and the epoch. A sampler of the
    user's own is kept: it must give the same on every peer."""
    batches = loader.batch_sampler
    own_batches = batches is not None and type(batches) is not BatchSampler
    sampler: Any = batches if own_batches else loader.sampler
    if not hasattr(sampler, "__len__"):
        raise UsageError(
            f"{type(sampler).__name__} has no __len__, so its samples cannot be shared out; give "
            "the loader a sampler that has one"
        )

    def order(epoch: int) -> Sequence[Any] | Tensor:
        if isinstance(sampler, RandomSampler) and not sampler.replacement:
            generator = torch.Generator("cpu").manual_seed(seed + epoch)
            return torch.randperm(
                len(sampler), dtype=torch.int64, device="cpu", generator=generator
            )
        if isinstance(sampler, SequentialSampler):
            return range(len(sampler))
        if (set_epoch := getattr(sampler, "set_epoch", None)) is not None:
            set_epoch(epoch)
        return list(sampler)

    def load(drawn: Iterator[list[Any]]) -> Iterable[Any]:
        kept = {name: getattr(loader, name) for name in _KEPT}
        if loader.num_workers and kept["multiprocessing_context"] is None:
            kept["multiprocessing_context"] = "spawn"  # a fork beside gRPC's threads may crash
        if batches is None:
            flat = itertools.chain.from_iterable(drawn)
            return DataLoader(loader.dataset, batch_size=None, sampler=flat, **kept)
        chosen = (batch for batch, *_ in drawn) if own_batches else drawn
        return DataLoader(loader.dataset, batch_sampler=chosen, **kept)

    size = 1 if own_batches else loader.batch_size or 1
    drop_last = not own_batches and loader.drop_last
    return _Indexed(len(sampler), order, load, size, drop_last)
