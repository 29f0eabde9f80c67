"""A share of the samples that no other peer has: what `swarm.shard` gives to a loop, and to a task
where `[task] data` is `leased`.

A stream of samples is leased in blocks (`worker.leases`): a `DataLoader` over a data set with
indices; any sequence; or whatever else can be iterated, which every peer reads from the front."""

import copy
import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import ref

from torch.utils.data import DataLoader

from murmuration.worker.errors import UsageError
from murmuration.worker.leases import LeasedBlocks, SampleStream
from murmuration.worker.leases.ledger import EPOCH_BLOCKS, LeaseMessage, ShareMessage
from murmuration.worker.library.samples import Indexed, drawing, indexed, told_by
from murmuration.worker.tasks import Batch, Cursor, SharesSamples, TaskError
from murmuration.worker.training.replica import RunIsOver
from murmuration.worker.wire import hash64

T = TypeVar("T")
Over = Callable[[], bool]  # whether the run is

MOST_SAMPLES, LEAST_BLOCKS = 1024, 128  # of a block, and of an epoch
_UNKNOWN_LENGTH = 8  # batches of a block where nobody knows the length
_MOST_OF = 0.9  # an epoch is as good as all of it
_UNTOLD = 128  # items: peers that start together skip the first blocks of the others
_ADVICE = (
    "; a stream with state_dict() and load_state_dict() goes on at its place, and with workers one "
    "in torchdata's StatefulDataLoader"
)
_END: Any = object()


class Shares:
    """The streams that this process draws from. train thread only. Args: seed: of random orders,
    the same on every peer; rank, ranks: of a site; receive: the next message of a stream, for which
    it waits; None when the run ends; drew: is told once of an epoch: batches of here, and all."""

    def __init__(
        self,
        seed: int,
        rank: int,
        ranks: int,
        post: Callable[[ShareMessage], None],
        receive: Callable[[int], LeaseMessage | None],
        warn: Callable[[str], None] = lambda text: None,
        drew: Callable[[int, int], None] | None = None,
    ) -> None:
        self._seed, self._rank, self._ranks = seed, rank, ranks
        self._post, self._receive, self._warn = post, receive, warn
        self._is_over = self._has_ended = False
        self._openings, self._drew = itertools.count(), drew
        self._sources: dict[int, ref[Any]] = {}
        self._open: dict[int, LeasedBlocks] = {}
        self._readers: dict[int, _ForwardReader[Any]] = {}

    def share(self, source: Iterable[T], name: str, block: int | None, over: Over) -> Iterator[T]:
        """Gives batches, or items, that no other peer has, until the epoch ends or the run is over;
        iterated again, those of the next. Args: name: tells streams apart that are as long; block:
        samples (or items). Raises UsageError: the block is below 1, the stream is another's, or
        peers cannot have one order."""
        return _Epochs(lambda: self._epoch(source, name, block, over))

    def _epoch(self, source: Iterable[T], name: str, block: int | None, over: Over) -> Iterator[T]:
        if block is not None and block < 1:
            raise UsageError(f"block={block}: at least one sample is leased at once")
        if (samples := indexed(source, self._seed)) is None:
            mark = ""  # what items that are read from the front depend on
            if isinstance(source, DataLoader):
                mark = f"{source.batch_size}/{source.drop_last}/{source.num_workers}"
            return self._in_order(source, self._stream(source, name, None, mark, block), over)
        stream = self._stream(source, name, len(samples), samples.mark, block)
        return self._by_index(samples, stream, over)

    def batches(self, task: SharesSamples, cursor: Cursor) -> Generator[Batch]:
        """Gives a task's batches that no other peer has, epoch after epoch; raises RunIsOver at the
        end. Raises TaskError: its loader has no batch, or does not know how many."""
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
        for blocks in self._open.values():
            blocks.tell()

    def end(self) -> None:
        """Tells it for the last time. What closes later, as the interpreter ends, is not."""
        self.tell()
        self._has_ended = True

    def streams(self) -> list[list[Any]]:
        """Gives each stream's state and how far it is read, for a checkpoint."""
        saved = {stream: reader.saved() for stream, reader in self._readers.items()}
        return [[stream, *each] for stream, each in saved.items() if each and each.state]

    def load_streams(self, streams: Iterable[Sequence[Any]]) -> None:
        for stream, *saved in streams:
            self._readers[stream] = _ForwardReader(self._warn, _SavedStream(*saved))

    def _stream(
        self, source: Any, name: str, length: int | None, mark: str, block: int | None
    ) -> SampleStream:
        if block is None:
            block = max(1, min(MOST_SAMPLES, (length or 0) // LEAST_BLOCKS))
            block = _UNKNOWN_LENGTH if length is None else block
        hashed = hash64(f"{name}/{length}/{block}/{mark}".encode())
        stream = SampleStream(hashed, block, length, length is None, name)
        held, before = getattr(source, "dataset", source), self._sources.get(stream.id)
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

    def _opened(
        self, stream: SampleStream, at_once: int, again: bool = False, first: int = 0
    ) -> LeasedBlocks:
        def receive() -> LeaseMessage | None:
            message = self._receive(stream.id)
            self._is_over = message is None
            return message

        if before := self._open.get(stream.id):
            before.abandon()
        whole, number = at_once * self._ranks, next(self._openings)
        blocks = LeasedBlocks(stream, whole, self._post, receive, number, again, first)
        self._open[stream.id] = blocks
        return blocks

    def _check_open(self, blocks: LeasedBlocks) -> None:
        if self._open.get(blocks.stream.id) is not blocks:
            raise UsageError("swarm.shard: a second loop over the same samples needs name='second'")

    def _closed(self, blocks: LeasedBlocks) -> None:
        if self._open.get(blocks.stream.id) is blocks:
            del self._open[blocks.stream.id]
            if not self._has_ended:
                blocks.close()

    def _by_index(self, samples: Indexed[T], stream: SampleStream, over: Over) -> Iterator[T]:
        blocks, drawn = self._opened(stream, samples.batch), 0
        sizes: deque[int] = deque()

        def places() -> Iterator[list[Any]]:
            """Places of this rank: a batch in each turn."""
            whole = samples.batch * self._ranks
            while runs := blocks.take(whole):
                chosen = [place for run in runs for place in samples.places(run, stream)]
                if len(chosen) < whole and (self._ranks > 1 or samples.drop_last):
                    return  # what is left over goes back
                sizes.append(len(chosen))
                yield chosen[self._rank * samples.batch : (self._rank + 1) * samples.batch]

        try:
            for batch in samples.load(places()):
                if over():
                    return
                blocks.use(sizes.popleft())
                yield batch
                self._check_open(blocks)
                drawn += 1
            if self._drew is not None and drawn < _MOST_OF * samples.batches(self._ranks):
                self._drew(drawn, samples.batches(self._ranks))
                self._drew = None
        finally:
            self._closed(blocks)

    def _in_order(self, source: Iterable[T], stream: SampleStream, over: Over) -> Iterator[T]:
        if (reader := self._readers.get(stream.id)) is None:
            if any(each.waits and each.name == stream.name for each in self._readers.values()):
                self._warn(
                    f"swarm.shard begins {stream.name or 'the stream'} again, and samples come "
                    "twice: set batch_size, drop_last, num_workers and block as in the checkpoint"
                )
            reader = self._readers[stream.id] = _ForwardReader(self._warn, name=stream.name)
        again = False
        while True:
            reader.open(source)
            saved = None if again else reader.saved()
            first = saved.epoch * EPOCH_BLOCKS + saved.at // stream.block if saved else 0
            blocks = self._opened(stream, 1, again, first)
            try:
                for item in self._pass(reader, blocks, over):
                    blocks.use(self._ranks)
                    yield item
                    self._check_open(blocks)
            finally:
                if self._open.get(stream.id) is blocks:
                    reader.close()
                self._closed(blocks)
            again = blocks.passed_over and self._ranks == 1
            if again and _keeper_of(source) is None:
                again = iter(source) is not source  # this begins a loader's workers
            if not again:
                return

    def _pass(self, reader: "_ForwardReader[T]", blocks: LeasedBlocks, over: Over) -> Iterator[T]:
        """Reads all, as each peer does, and leaves out what is not its own."""
        size = blocks.stream.block
        while not over() and (runs := blocks.take(self._ranks)):
            group: list[T] = []
            for run in runs:
                first = run.block.place * size
                with drawing(self._seed + run.epoch, reader.drawn):
                    group += reader.read(run.epoch, first + run.begin, first + run.end)
                if reader.first_item:
                    blocks.begin_with(run.epoch, hash64(reader.first_item.encode()))
                    reader.first_item = ""
                if reader.at < first + run.end:
                    blocks.end_epoch(run, reader.at)
            if len(group) == self._ranks and not over():
                yield group[self._rank]


class _Epochs(Iterator[T]):
    """Gives what `begin` gives, and that again after its end: a loop over epochs may hold it."""

    def __init__(self, begin: Callable[[], Iterator[T]]) -> None:
        self._begin, self._items = begin, begin()

    def __next__(self) -> T:
        for item in self._items:
            return item
        self._items = (item for begin in (self._begin,) for item in begin())
        raise StopIteration("the share of this peer ends: len(loader) batches are for all together")

    def close(self) -> None:
        self._items, self._begin = iter(()), lambda: iter(())

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        raise TypeError("no share has a length before it is drawn; all together have len(loader)")


class _SavedStream(NamedTuple):
    """The state of a stream of this name after `at` items of an epoch."""

    epoch: int
    at: int
    state: Any
    name: str = ""


class _ForwardReader(Generic[T]):
    """One stream, pass after pass; `saved` is of a checkpoint. train thread only. Attributes: at:
    items that are read in this pass; drawn: of generators; first_item: a text of it, not yet told;
    waits: nothing was read since the checkpoint."""

    first_item = ""

    def __init__(
        self, warn: Callable[[str], None], saved: _SavedStream | None = None, name: str = ""
    ) -> None:
        self.drawn: list[Any] = []
        self.at, self.waits = 0, saved is not None
        self.name = name if saved is None else saved.name
        self._warn, self._saved = warn, saved
        self._front: Any = None  # the state before anything was read
        self._keeper: Any = None
        self._source: Any = ()
        self._last: Callable[[], Any] = lambda: None
        self._items: Iterator[T] | None = None
        self._epoch, self._told, self._goes_on = 0, False, False

    def open(self, source: Iterable[T]) -> None:
        self.close()
        self.waits = False
        self._source, self._keeper = source, _keeper_of(source)
        if self._keeper is not None and self._front is None:
            self._front = copy.deepcopy(self._keeper.state_dict())
        # An __iter__ that does more than to return itself may begin again.
        does = getattr(getattr(type(source), "__iter__", None), "__code__", None)
        once = isinstance(source, Iterator) and not (does and does.co_names)
        self._goes_on = once and self._last() is source and self._keeper is None
        if not self._goes_on:
            self._saved, self.drawn = self._saved if self._keeper else None, []
        try:
            self._last = ref(source)
        except TypeError:  # a zip has no weak references
            self._last = lambda: source

    def close(self) -> None:
        """The pass is over. What the loop may build anew for the next one is not kept."""
        self._saved = self.saved()
        self._source, self._keeper, self._items = (), None, None
        self.at, self._told = 0, False

    def saved(self) -> _SavedStream | None:
        """Gives where it is; without a state that is good for the same iterator alone."""
        if self._items is None:
            return self._saved
        state = None if self._keeper is None else copy.deepcopy(self._keeper.state_dict())
        return _SavedStream(self._epoch, self.at, state, self.name)

    def read(self, epoch: int, begin: int, end: int) -> list[T]:
        """Reads items `begin` to `end` of an epoch, from where it was; fewer at the epoch's end."""
        items = self._begin(epoch, begin) if self._items is None else self._items
        if begin - self.at > _UNTOLD and not self._told:
            self._told = True
            self._warn(
                f"swarm.shard skips {begin - self.at:,} items of {type(self._data).__name__}, "
                f"which are read for nothing{'' if self._keeper else _ADVICE}"
            )
        while self.at < begin and next(items, _END) is not _END:
            self.at += 1
        found = list(itertools.islice(items, end - self.at)) if self.at >= begin else []
        self.at += len(found)
        return found

    @property
    def _data(self) -> Any:
        return getattr(self._source, "dataset", self._source)

    def _begin(self, epoch: int, place: int) -> Iterator[T]:
        if (set_epoch := getattr(self._data, "set_epoch", None)) is not None:
            set_epoch(epoch)
        saved = self._saved or _SavedStream(epoch, 0, self._front)
        if saved.epoch != epoch or saved.at > place:
            saved = _SavedStream(epoch, 0, self._front)
            if self._goes_on:
                self._warn(
                    f"swarm.shard: a {type(self._source).__name__} gives its items once, and has "
                    "none for another epoch; share what begins again, as a list or a DataLoader"
                )
                self._source = ()
        if self._keeper is not None:
            self._keeper.load_state_dict(copy.deepcopy(saved.state))
        self._epoch, self.at = epoch, saved.at
        items = self._items = (item for item in self._source)  # whose __iter__ is called once
        for first in itertools.islice(items, 0 if self.at else 1):
            self.first_item = told_by(first)
            self._items = itertools.chain([first], items)
        return self._items


def _keeper_of(source: Any) -> Any:
    """Finds what keeps a stream's state: itself, or the data of a loader without workers."""
    found = [source]
    if isinstance(source, DataLoader) and not source.num_workers:
        found.append(source.dataset)
    return next((each for each in found if {*dir(each)} >= {"state_dict", "load_state_dict"}), None)
