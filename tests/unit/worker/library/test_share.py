"""The samples that peers share reach loops once each, whatever they come from."""

import itertools
import json
import random
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils import data
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from murmuration.worker.errors import UsageError
from murmuration.worker.leases.ledger import LeaseMessage
from murmuration.worker.library.share import Shares
from murmuration.worker.tasks import Cursor, TaskError
from murmuration.worker.training.replica import RunIsOver
from tests.support.peers import row
from tests.support.refusals import one_line
from tests.unit.worker.leases.tables import Tables


class Peers:
    """Loops that share samples, all in one thread."""

    def __init__(self, *names: str) -> None:
        self.tables = Tables(*names)
        self.names, self.over, self.ended = names, False, False
        self.warned: list[str] = []
        self.drew: list[tuple[int, int]] = []
        self.shares = {name: self._shares(name) for name in names}

    def _shares(self, name: str) -> Shares:
        tables = self.tables

        def receive(_stream: int) -> LeaseMessage | None:
            for _ in range(3):
                if self.ended:
                    return None
                if tables.received[name]:
                    return tables.received[name].popleft()
                tables.tick()
            raise AssertionError(f"{name} waits for ever")

        post, drew = partial(tables.handle, name), lambda *those: self.drew.append(those)
        return Shares(7, 0, 1, post, receive, self.warned.append, drew)

    def share(self, name: str, source: Any, block: int | None = None, stream: str = "") -> Any:
        """The loop of one of them, until the run is over."""
        return self.shares[name].share(source, stream, block, lambda: self.over)

    def restarted(self, name: str) -> "Peers":
        """Another process, which goes on from a checkpoint of this one: as plain values."""
        shares, after = self.shares[name], Peers(name)
        for each in self.shares.values():
            each.tell()
        after.tables.tables[name].ledger.load(self.tables.tables[name].ledger.plain())
        after.shares[name].load_streams(json.loads(json.dumps(shares.streams())))
        return after

    def draw(
        self, sources: dict[str, Any], block: int | None = None, stream: str = ""
    ) -> dict[str, list[Any]]:
        """An epoch: the loops take turns."""
        loops = {name: self.share(name, each, block, stream) for name, each in sources.items()}
        drawn: dict[str, list[Any]] = {name: [] for name in sources}
        while loops:
            for name, loop in list(loops.items()):
                for item in loop:
                    drawn[name].append(item)
                    break
                else:
                    del loops[name]
        return drawn


def loader(size: int = 4, length: int = 24, **more: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(length)), batch_size=size, **more)


def values(drawn: dict[str, list[Any]]) -> list[int]:
    return [int(v) for batches in drawn.values() for (batch,) in batches for v in batch]


@row("`swarm.shard(loader)` made once, before the loop over epochs", "shared", "as in each epoch")
@row("`len(swarm.shard(loader))`", "refused", "nobody knows it: a line says what `len(loader)` is")
def test_a_share_that_is_held_gives_epoch_after_epoch_and_has_no_length():
    share = Peers("a").share("a", loader())
    with one_line(TypeError, "no share has a length before it is drawn"):
        len(share)
    assert [sorted(values({"a": list(share)})) for _ in range(3)] == [list(range(24))] * 3
    with one_line(StopIteration, r"len\(loader\) batches are for all"):
        [next(share) for _ in range(7)]
    broken_off = values({"a": list(islice(share, 2))})
    assert sorted(broken_off + values({"a": list(share)})) == list(range(24))
    share.close()
    assert (bool(share), *share, *share) == (True,)


class Letters(IterableDataset[str], Iterator[str]):
    """Begins again when it is iterated, and is its own iterator."""

    def __iter__(self) -> "Letters":
        self._left = iter("abcdefghijklmnopqrs")
        return self

    def __next__(self) -> str:
        return next(self._left)


@row("schedules, windows and `next` by `len(loader)`", "told", "how many batches are here")
def test_batches_of_a_users_own_sampler_stay_whole_and_are_counted():
    def own() -> DataLoader[Any]:
        class Pairs(data.BatchSampler):
            """By length, say."""

        sampler = Pairs(data.SequentialSampler(range(11)), 2, drop_last=False)
        return DataLoader(TensorDataset(torch.arange(11)), batch_sampler=sampler)

    peers = Peers("a", "b")
    drawn = peers.draw({"a": own(), "b": own()})
    assert peers.drew == [(3, 6), (3, 6)]
    batches = sorted(batch.tolist() for each in drawn.values() for (batch,) in each)
    assert batches == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10]]


class Endless(data.Sampler[int]):
    """It does not say how many there are."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(12))


class Numbered:
    def __init__(self, length: int, **more: Any) -> None:
        self._pairs, self._more = TensorDataset(torch.arange(length), torch.zeros(length)), more

    def loader(self) -> DataLoader[Any]:
        return DataLoader(self._pairs, batch_size=4, **self._more)


def test_a_tasks_batches_are_those_of_all_epochs_and_end_with_the_run():
    peers, start = Peers("a"), Cursor(seed=7, stream="w", position=100)
    batches = peers.shares["a"].batches(Numbered(22), start)
    found = [next(batches) for _ in range(12)]
    drawn = [int(value) for batch in found for value in batch.inputs]
    assert sorted(drawn[:22]) == list(range(22)) == sorted(drawn[22:])
    assert [batch.cursor.position for batch in found[4:7]] == [120, 122, 126]
    peers.ended = True
    with pytest.raises(RunIsOver):
        next(batches)


def test_a_tasks_loader_that_cannot_be_shared_is_the_tasks_error():
    for task, says in [
        (Numbered(3, drop_last=True), r"loader\(\) has no batch"),
        (Numbered(12, sampler=Endless()), r"loader\(\) must have a length"),
        (
            Numbered(12, sampler=data.DistributedSampler(range(12), num_replicas=2, rank=0)),  # type: ignore[arg-type]
            r"the task's loader\(\): DistributedSampler gives",
        ),
    ]:
        with pytest.raises(TaskError, match=says):
            next(Peers("a").shares["a"].batches(task, Cursor(seed=7, stream="w")))


def test_worker_processes_load_ahead_and_what_they_loaded_in_vain_goes_back():
    peers, ahead = Peers("a"), loader(2, 40, num_workers=1, prefetch_factor=4)
    first = peers.share("a", ahead, 4)
    begun = [next(first) for _ in range(3)]
    first.close()
    rest = peers.draw({"a": ahead}, block=4)
    assert values({"a": begun}) == list(range(6))
    assert sorted(values(rest)) == list(range(6, 40))


def test_an_incomplete_batch_is_left_to_the_next_epoch_where_none_is_wanted():
    peers = Peers("a")
    first, second = (peers.draw({"a": loader(4, 10, drop_last=True)}) for _ in range(2))
    assert [len(values(first)), len(values(second)), peers.drew] == [8, 12, []]
    assert sorted(values(first) + values(second))[:4] == [0, 0, 1, 1]


@pytest.mark.parametrize("block", [1, 3, 19, 20])
@pytest.mark.parametrize("kind", [Letters, lambda: DataLoader(Letters(), batch_size=None)])
def test_a_stream_whose_length_nobody_knows_is_shared_to_its_end(block, kind):
    peers, sources = Peers("a", "b"), {name: kind() for name in "ab"}
    for _ in range(2):
        drawn = peers.draw(sources, block=block)
        assert sorted([*drawn["a"], *drawn["b"]]) == list("abcdefghijklmnopqrs")


class Counting(IterableDataset[int]):
    """Numbers. Counts those that were read in this process."""

    def __init__(self, stop: int) -> None:
        self.stop, self.read = stop, 0

    def __iter__(self) -> Iterator[int]:
        for number in range(self.stop):
            self.read += 1
            yield number


class Stateful(Counting):
    """Goes on anywhere, and in each epoch of its own has other numbers."""

    at, epoch = 0, 0

    def __iter__(self) -> Iterator[int]:
        while self.at < self.stop:
            self.read, self.at = self.read + 1, self.at + 1
            yield self.epoch * self.stop + self.at - 1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def documents() -> Any:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"n": range(96)})
    return rows.to_iterable_dataset(num_shards=4)


@pytest.mark.parametrize("batch", [None, 2], ids=["itself", "in a loader"])
@pytest.mark.parametrize("kind", [lambda: Stateful(96), documents], ids=["own", "datasets"])
def test_a_stream_with_a_state_goes_on_in_it_after_a_restart(kind, batch):
    """Then in the next epoch from the front."""

    def source() -> Any:
        return kind() if batch is None else DataLoader(kind(), batch_size=batch)

    peers = Peers("a")
    drawn = [*islice(peers.share("a", source(), 4), 31)]
    peers, after = peers.restarted("a"), source()
    for epoch in range(2):
        (rest,) = peers.draw({"a": after}, block=4).values()
        items = (each["n"] if isinstance(each, dict) else each for each in drawn + rest)
        numbers = torch.cat([torch.as_tensor(each).flatten() for each in items])
        assert numbers.remainder(96).tolist() == [*range(96)], epoch
        drawn = []


def _site(tables: Tables, ranks: int) -> list[Shares]:
    """The ranks of one peer. They are told what rank 0 is told, in the same order."""
    told: list[LeaseMessage] = []

    def receive(_stream: int) -> LeaseMessage:
        tables.tick()
        told.append(tables.received["a"].popleft())
        return told[-1]

    def follower(rank: int) -> Shares:
        heard = itertools.count()
        return Shares(7, rank, ranks, lambda _: None, lambda _: told[next(heard)])

    first = Shares(7, 0, ranks, lambda message: tables.handle("a", message), receive)
    return [first, *map(follower, range(1, ranks))]


def test_a_stream_that_two_ranks_have_saved_is_gone_on_from_by_three_and_by_one():
    """Each item is drawn once, and no rank reads what is before its place."""
    drawn: list[int] = []
    saved, used = [], None
    for ranks, steps in ((2, 7), (3, 5), (1, 11)):
        tables = Tables("a")
        if used is not None:
            tables.tables["a"].ledger.load(used)
        shares, sources = _site(tables, ranks), [Stateful(40) for _ in range(ranks)]
        for each in shares:
            each.load_streams(saved)
        both = zip(shares, sources, strict=True)
        loops = [each.share(source, "", 4, lambda: False) for each, source in both]
        for _ in range(steps):
            drawn += [next(loop) for loop in loops]
        assert [source.read for source in sources] == [ranks * steps] * ranks
        shares[0].tell()
        used, saved = tables.tables["a"].ledger.plain(), json.loads(json.dumps(shares[0].streams()))
    assert drawn == [*range(40)]


def test_a_stream_in_batches_of_another_size_is_told_to_begin_again():
    peers = Peers("a")
    next(peers.share("a", DataLoader(Stateful(96), 2), 4, "letters"))
    for size in (2, 3):
        after = peers.restarted("a")
        next(after.share("a", DataLoader(Stateful(96), 2), 4, "other"))
        next(after.share("a", DataLoader(Stateful(96), size), 4, "letters"))
        assert ["begins letters again" in text for text in after.warned] == [True] * (size - 2)


def test_peers_that_go_on_in_a_stream_leave_none_of_it_out():
    """The items behind a peer that goes on are read in another pass."""
    peers = Peers("a", "b")
    loops = {name: peers.share(name, Stateful(99), 4) for name in "ab"}
    drawn = [next(loops[name]) for _ in range(21) for name in "ba"]
    (rest,) = peers.restarted("a").draw({"a": Stateful(99)}, block=4).values()
    assert rest[0] == drawn[-1] + 1 > min(rest)
    assert sorted([*drawn, *rest]) == [*range(99)]


@pytest.mark.parametrize(
    ("kind", "at", "read"),
    [(Stateful, 10_000_000, 5), (Counting, 1_000_000, 1_000_005)],
    ids=["with a state", "without"],
)
def test_a_stream_that_goes_on_at_sample_ten_million(kind, at, read):
    """Without a state all before is read again, which is told."""
    first, late = Peers("a"), Peers("a")
    next(first.share("a", kind(at + 5), 8))
    first.shares["a"].tell()
    ((stream, _),) = first.tables.tables["a"].ledger.cursors
    late.tables.tables["a"].ledger.finish(stream, 0, at // 8)
    late.shares["a"].load_streams([[stream, 0, at, {"at": at}]])
    source = kind(at + 5)
    assert late.draw({"a": source}, block=8) == {"a": [*range(at, at + 5)]}
    assert source.read == read
    told = [f"swarm.shard skips {at:,} items of Counting" in text for text in late.warned]
    assert told == ([True] if kind is Counting else [])


@row("one generator for several calls of `swarm.shard`", "shared", "each goes on where it is")
@row("a generator that is shared again after its end", "told", "give what begins again")
@pytest.mark.parametrize("of", [iter, lambda n: iter(DataLoader(n, None))])
def test_an_iterator_is_read_once(of):
    source = Counting(9)
    assert Peers("a").draw({"a": source}, block=4) == {"a": [*range(9)]}
    assert source.read == 9
    peers, sources = Peers("a", "b"), {name: of(range(90)) for name in "ab"}
    drawn = [n for _ in range(3) for a in "ab" for n in islice(peers.share(a, sources[a], 4), 5)]
    drawn += [n for each in peers.draw(sources, block=4).values() for n in each]
    assert sorted(drawn) == list(range(90))
    assert (peers.warned, peers.tables.differing) == ([], {})
    assert peers.draw(sources, block=4) == {"a": [], "b": []}
    assert "gives its items once" in peers.warned[0]


def test_ranks_of_a_site_take_as_much_each():
    loops = [each.share(loader(3, 44), "", 5, lambda: False) for each in _site(Tables("a", "b"), 2)]
    drawn = dict(enumerate(zip(*zip(*loops, strict=True), strict=True)))
    assert [len(each) for each in drawn.values()] == [7, 7]
    assert len(set(values(drawn))) == 42
    assert {len(batch) for each in drawn.values() for (batch,) in each} == {3}


@row("two loops at once over the same samples, as `zip` of two calls", "refused", "name one")
def test_the_end_of_the_run_ends_it_and_no_second_call_the_first():
    peers = Peers("a")
    first = peers.share("a", range(20), 2)
    begun = [next(first) for _ in range(3)]
    second = peers.share("a", range(20), 2)
    assert sorted([*begun, *second]) == list(range(20))
    with pytest.raises(UsageError, match="a second loop over the same samples needs name"):
        next(first)
    loop = peers.share("a", range(50))
    assert [next(loop), next(loop)] == [0, 1]
    peers.over = True
    assert list(loop) == []


class Shuffled(IterableDataset[int]):
    """Numbers, from a buffer that a generator of its own shuffles, or that of `random`."""

    def __init__(self, seed: int | None = None) -> None:
        self._shuffle = random.shuffle if seed is None else random.Random(seed).shuffle

    def __iter__(self) -> Iterator[int]:
        left = list(range(40))
        while left:
            self._shuffle(left)
            yield left.pop()


@row("a shuffled loader within tqdm, `zip` or a generator", "shared", "in one order")
@row("a stream that global generators shuffle", "shared", "in one order")
@pytest.mark.parametrize(
    "wrapped",
    [
        *(enumerate, iter, lambda loader: zip(loader, loader, strict=True)),
        *(lambda loader: (batch for batch in loader), lambda _: Shuffled()),
    ],
    ids=["enumerate", "iter", "zip", "generator", "a stream"],
)
def test_what_is_shuffled_as_it_is_read_has_one_order_on_all_peers(wrapped):
    peers, sources = Peers("a", "b"), {name: wrapped(loader(1, 40, shuffle=True)) for name in "ab"}
    drawn = itertools.chain.from_iterable(peers.draw(sources, block=4).values())
    items = [each[-1] if isinstance(each, tuple) else each for each in drawn]
    numbers = [int(each[0]) if isinstance(each, list) else each for each in items]
    assert (sorted(numbers), peers.tables.differing) == ([*range(40)], {})


@row("a stream that generators of each peer's own shuffle", "told", "samples come twice or never")
def test_a_stream_in_another_order_is_told_on_both_sides():
    peers, sources = Peers("a", "b"), {"a": Shuffled(1), "b": Shuffled(2)}
    for _ in range(3):
        peers.draw(sources)
    assert peers.tables.differing == {"a": ["b"], "b": ["a"]}
    assert len(peers.tables.tables["a"]._drawn) == 2  # the stream, and what its epoch begins with


def test_a_stream_makes_its_tensors_where_the_program_says():
    with torch.device("meta"):
        (drawn,) = Peers("a").draw({"a": (torch.zeros(1) for _ in range(9))}).values()
    assert [each.device.type for each in drawn] == ["meta"] * 9


@pytest.mark.parametrize("source", [range(9), iter(range(9))], ids=["by index", "in order"])
def test_a_loop_that_the_interpreter_ends_tells_nothing_more(source):
    """Its modules are gone by then: a program that had not read all of an epoch said so."""
    peers = Peers("a")
    loop, shares = peers.share("a", source, 3), peers.shares["a"]
    next(loop)
    shares.end()
    for blocks in shares._open.values():
        blocks._post = None  # type: ignore[assignment]  # as modules have it then
    loop.close()


def test_two_data_sets_of_one_length_need_names():
    peers, train, other = Peers("a"), loader(), loader()
    peers.share("a", train)
    with pytest.raises(UsageError, match="name='validation'"):
        peers.share("a", other)
    peers.share("a", other, stream="validation")
    with pytest.raises(UsageError, match="block=0"):
        peers.share("a", train, 0)
