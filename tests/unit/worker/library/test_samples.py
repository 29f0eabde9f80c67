"""Samplers of every kind: what they would draw is drawn once by the swarm, or refused in a line."""

import random
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, repeat
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import data
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Subset, TensorDataset

from murmuration.worker.errors import UsageError
from tests.support.peers import row
from tests.support.refusals import one_line
from tests.unit.worker.library.test_share import Endless, Letters, Peers, documents, loader, values

N = 96
DATA = TensorDataset(torch.arange(N))
PEERS = "abc"


def _loader(sampler: Any) -> DataLoader[Any]:
    return DataLoader(DATA, batch_size=2, sampler=sampler)


def _batched(sampler: Any, size: int = 2) -> DataLoader[Any]:
    return DataLoader(DATA, batch_sampler=BatchSampler(sampler, size, False))


def _seeded(peer: int) -> torch.Generator:
    return torch.Generator().manual_seed(peer)


class By(data.Sampler[int]):
    """Draws by a function of itself. Args: says: how many; held: under names of its own."""

    def __init__(self, draw: Callable[[Any], Iterable[int]], says: int = N, **held: object) -> None:
        self.draw, self.says = draw, says
        vars(self).update(held)

    def __len__(self) -> int:
        return self.says

    def __iter__(self) -> Iterator[int]:
        return iter(self.draw(self))


def _of_globals(_sampler: object) -> Iterable[int]:
    order = np.random.permutation(N).tolist()
    random.shuffle(order)
    return (order[i] for i in torch.randperm(N).tolist())


def _held(seed: int) -> By:
    """Holds a generator under a name of its own, seeded otherwise on each peer."""
    return By(lambda own: torch.randperm(N, generator=own.source).tolist(), source=_seeded(seed))


def _chained(*parts: Any) -> By:
    return By(lambda own: chain.from_iterable(own.parts), sum(map(len, parts)), parts=[*parts])


def _distributed(count: int) -> data.DistributedSampler[Any]:
    return data.DistributedSampler(DATA, num_replicas=count, rank=0)


class Rows(Dataset[Any]):
    """Takes lists of indices."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: Any) -> Any:
        return (torch.tensor(index).reshape(-1),)


# By peer, what it gives to `swarm.shard`; how many are drawn; and of how many.
SHARED: dict[str, tuple[Callable[[int], Any], int]] = {
    "shuffle": (lambda _: loader(2, N, shuffle=True), N),
    "a seed of each peer's": (lambda p: loader(2, N, shuffle=True, generator=_seeded(p)), N),
    "batch_sampler": (lambda p: _batched(RandomSampler(DATA), 2 + p), N),
    "batch_sampler of some": (lambda _: _batched(data.SubsetRandomSampler(range(50))), 50),
    "batches as a sampler": (
        lambda _: DataLoader(
            Rows(), batch_size=None, sampler=BatchSampler(RandomSampler(DATA), 4, False)
        ),
        N,
    ),
    "Subset": (lambda _: DataLoader(Subset(DATA, range(3, 50)), batch_size=2, shuffle=True), 47),
    "ConcatDataset": (
        lambda _: DataLoader(data.ConcatDataset([DATA, Subset(DATA, [1])]), 4, shuffle=True),
        N + 1,
    ),
    "SubsetRandomSampler": (lambda _: _loader(data.SubsetRandomSampler(range(60))), 60),
    "weights": (lambda _: _loader(data.WeightedRandomSampler([1.0, 5.0] * 48, 70)), 70),
    "replacement": (lambda _: _loader(RandomSampler(DATA, replacement=True)), N),
    "more than there are": (lambda _: _loader(RandomSampler(DATA, num_samples=150)), 150),
    "fewer": (lambda _: _loader(RandomSampler(DATA, num_samples=60)), 60),
    "global generators": (lambda _: _loader(By(_of_globals)), N),
    "a generator of its own": (lambda p: _loader(_held(p)), N),
    "samplers in a list": (
        lambda p: _loader(_chained(_held(p), RandomSampler(DATA, generator=_seeded(p)))),
        2 * N,
    ),
    "DistributedSampler of one": (lambda _: _loader(_distributed(1)), N),
    "a Dataset": (lambda _: Rows(), N),
}


@pytest.mark.parametrize("kind", SHARED)
@row("a `Subset`, `batch_sampler=`, random, weighted or replacement sampler", "shared", "as drawn")
def test_what_the_sampler_draws_is_drawn_once(kind):
    make, count = SHARED[kind]

    def source(peer: int) -> Any:
        torch.manual_seed(peer)
        random.seed(peer)
        np.random.seed(peer)
        return make(peer)

    alone, peers = values(Peers("a").draw({"a": source(0)})), Peers(*PEERS)
    drawn = peers.draw({name: source(place) for place, name in enumerate(PEERS)})
    assert sorted(values(drawn)) == sorted(alone)
    assert len(alone) == count
    assert not peers.tables.differing


def test_fewer_samples_than_peers_are_drawn_once_in_each_epoch():
    """A peer that finds nothing left begins the next epoch."""
    few = DataLoader(Subset(DATA, [5, 7]), batch_size=4)
    drawn = values(Peers(*PEERS).draw(dict.fromkeys(PEERS, few)))
    assert sorted(drawn) == [5] * (len(drawn) // 2) + [7] * (len(drawn) // 2)


def test_the_order_is_another_in_each_epoch_and_the_users_generators_go_on():
    peers, generator = Peers("a"), torch.Generator().manual_seed(1)
    source = _loader(data.WeightedRandomSampler([1.0] * N, N, generator=generator))
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    peers.share("a", source)
    assert torch.equal(torch.rand(1), expected)
    first, second = (values(peers.draw({"a": source})) for _ in range(2))
    assert first != second
    assert source.sampler.generator is generator  # type: ignore[attr-defined]


class Unsized(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


class OwnLoader(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter([1])


def _part_of_documents() -> Any:
    hugging_faces = pytest.importorskip("datasets.distributed")
    return hugging_faces.split_dataset_by_node(documents(), rank=0, world_size=2)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "DistributedSampler": (lambda: _loader(_distributed(2)), "DistributedSampler gives this pro"),
    "within batches": (lambda: _batched(_distributed(2)), "leave it out"),
    "in a list": (lambda: _loader(_chained(_distributed(2))), "DistributedSampler gives this pro"),
    "no length": (lambda: loader(2, 12, sampler=Endless()), "Endless has no __len__"),
    "a part for one rank": (_part_of_documents, "leave split_dataset_by_node out"),
    "another order each time": (
        lambda: _loader(By(lambda own: own.random.sample(range(N), N), random=random.Random(0))),
        r"set_epoch\(epoch\)",
    ),
    "more than it says": (lambda: _loader(By(lambda _: [0] * 7, 5)), "gives more samples"),
    "without end": (lambda: _loader(By(lambda _: repeat(0), 5)), "gives more samples"),
    "fewer than it says": (lambda: _loader(By(lambda _: [0] * 5, 7)), "gives fewer samples"),
    "nothing": (lambda: _loader(data.SubsetRandomSampler([])), "there are no samples"),
    "an empty list": (list, "there are no samples"),
    "no whole batch": (lambda: loader(32, drop_last=True), "no batch of 32"),
    "data without a length": (lambda: DataLoader(Unsized()), "a sampler, or data, that has one"),
    "a dict of loaders": (lambda: {"train": loader()}, "and no dict"),
    "a number": (lambda: 5, "and no int"),
    "a set": (lambda: {"b", "a"}, "sorted"),
    "another kind": (lambda: OwnLoader(DATA), "OwnLoader gives batches in a way of its own"),
}


@pytest.mark.parametrize("kind", REFUSED)
@row(
    "`DistributedSampler`, a sampler without a fixed order or length, no samples",
    "refused",
    "a line says what to give the loader",
)
def test_what_cannot_be_shared_is_refused(kind):
    make, line = REFUSED[kind]
    with one_line(UsageError, line):
        Peers("a").draw({"a": make()})


def _split(peer: int) -> DataLoader[Any]:
    torch.manual_seed(peer)
    return DataLoader(data.random_split(DATA, [N // 2, N // 2])[0])


class Own(Dataset[Any]):
    """Data of a user's kind; with noise it is another each time."""

    def __init__(self, first: int = 0, noise: float = 0.0) -> None:
        self.first, self.noise, self.read = first, noise, 0

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        value = torch.tensor([1.0 + self.first + index]) + self.noise * torch.randn(1)
        return {"x": value, "y": np.array([self.first + index]), "z": [str(index)]}


def _documents(peer: int) -> Any:
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_dict({"text": [str(i) for i in range(N)]})
    return whole.train_test_split(0.25, seed=peer)["train"]


DIFFERENT: dict[str, Callable[[int], Any]] = {
    "splits": _split,
    "parts by hand": lambda p: DataLoader(Subset(DATA, range(12 * p, 12 * p + 12))),
    "content": lambda p: DataLoader(TensorDataset(torch.arange(N) + p)),
    "a list": lambda p: [p, 2, 3],
    "a list of tensors": lambda p: DataLoader([torch.tensor([p])] * 5),  # type: ignore[arg-type]
    "content of a user's kind": lambda p: DataLoader(Own(p)),
    "a part of a user's kind": lambda p: DataLoader(Subset(Own(), range(p, 20 + p)), num_workers=1),
    "a split of documents": lambda p: DataLoader(_documents(p), num_workers=1),
    "length": lambda p: DataLoader(Subset(DATA, range(12 + p))),
    "the order": lambda p: _loader(data.SequentialSampler(DATA) if p else list(reversed(range(N)))),
    "batches of what is read from the front": lambda p: DataLoader(Letters(), batch_size=2 + p),
}


@pytest.mark.parametrize("kind", DIFFERENT)
@row("`random_split` without a generator: training draws what is held out", "told", "by both")
@row(
    "other data or another order on each peer",
    "told",
    "both say so once, and each draws all of its own",
)
def test_other_samples_than_a_peers_are_told_and_drawn_by_each(kind):
    peers = Peers("a", "b")
    sources = {name: DIFFERENT[kind](place) for place, name in enumerate("ab")}
    drawn = peers.draw(sources)
    assert [len(drawn[name]) for name in "ab"] == [len(list(sources[name])) for name in "ab"]
    assert peers.tables.differing == {"a": ["b"], "b": ["a"]}


def test_the_last_bits_of_fractions_do_not_count():
    peers, rows = Peers("a", "b"), torch.linspace(0.11, 3, 50)
    peers.draw({"a": DataLoader(TensorDataset(rows)), "b": DataLoader(TensorDataset(rows + 1e-7))})
    assert not peers.tables.differing


def test_noise_does_not_count_and_what_workers_read_is_not_read_here():
    peers, noisy = Peers("a", "b"), [Own(noise=1.0), Own(noise=1.0)]
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    for name, own in zip("ab", noisy, strict=True):
        peers.share(name, DataLoader(own))
    assert torch.equal(torch.random.get_rng_state(), before)
    peers.draw({name: DataLoader(own) for name, own in zip("ab", noisy, strict=True)})
    unread = Own()
    peers.share("a", DataLoader(unread, num_workers=1), stream="unread")
    assert not peers.tables.differing
    assert unread.read == 0


def test_peers_in_other_sets_of_data_at_a_time_are_not_told():
    peers = Peers("a", "b")
    train, held_out = loader(length=16), loader(length=8)
    peers.draw({"a": train, "b": loader(length=16)})
    peers.draw({"a": held_out, "b": loader(length=16)})
    peers.draw({"a": train, "b": loader(length=8)})
    peers.draw({"a": train}, stream="more")
    assert not peers.tables.differing
