"""Samplers of every kind: what they would draw is drawn once by the swarm, or refused in a line."""

import random
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

from murmuration.worker.errors import UsageError
from tests.support.peers import row
from tests.unit.worker.library.test_share import Endless, Letters, Peers, documents, loader, values

N = 96
DATA = TensorDataset(torch.arange(N))
PEERS = "abc"


def _loader(sampler: Any, **more: Any) -> DataLoader[Any]:
    return DataLoader(DATA, batch_size=2, sampler=sampler, **more)


class OfGlobals(Sampler[int]):
    """Draws from the generators that all share."""

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        order = np.random.permutation(N).tolist()
        random.shuffle(order)
        return iter(order[i] for i in torch.randperm(N).tolist())


class Held(Sampler[int]):
    """Holds a generator under a name of its own, seeded otherwise on each peer."""

    def __init__(self, seed: int) -> None:
        self.source = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(N, generator=self.source).tolist())


class Rows(Dataset[Any]):
    """Takes lists of indices."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: Any) -> Any:
        return (torch.tensor(index).reshape(-1),)


class Chained(Sampler[int]):
    """Draws from samplers in a list."""

    def __init__(self, *parts: Any) -> None:
        self.parts = [*parts]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self.parts)


def _seeded(peer: int) -> torch.Generator:
    return torch.Generator().manual_seed(peer)


# By peer, what it gives to `swarm.shard`; how many are drawn; and of how many.
SHARED: dict[str, tuple[Callable[[int], Any], int]] = {
    "shuffle": (lambda _: loader(2, N, shuffle=True), N),
    "a seed of each peer's": (lambda p: loader(2, N, shuffle=True, generator=_seeded(p)), N),
    "batch_sampler": (
        lambda p: DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 2 + p, False)),
        N,
    ),
    "batch_sampler of some": (
        lambda _: DataLoader(
            DATA, batch_sampler=BatchSampler(SubsetRandomSampler(range(50)), 2, False)
        ),
        50,
    ),
    "batches as a sampler": (
        lambda _: DataLoader(
            Rows(), batch_size=None, sampler=BatchSampler(RandomSampler(DATA), 4, False)
        ),
        N,
    ),
    "Subset": (lambda _: DataLoader(Subset(DATA, range(3, 50)), batch_size=2, shuffle=True), 47),
    "ConcatDataset": (
        lambda _: DataLoader(ConcatDataset([DATA, Subset(DATA, [1])]), batch_size=4, shuffle=True),
        N + 1,
    ),
    "SubsetRandomSampler": (lambda _: _loader(SubsetRandomSampler(range(60))), 60),
    "weights": (lambda _: _loader(WeightedRandomSampler([1.0, 5.0] * 48, 70)), 70),
    "replacement": (lambda _: _loader(RandomSampler(DATA, replacement=True)), N),
    "more than there are": (lambda _: _loader(RandomSampler(DATA, num_samples=150)), 150),
    "fewer": (lambda _: _loader(RandomSampler(DATA, num_samples=60)), 60),
    "global generators": (lambda _: _loader(OfGlobals()), N),
    "a generator of its own": (lambda p: _loader(Held(p)), N),
    "samplers in a list": (
        lambda p: _loader(Chained(Held(p), RandomSampler(DATA, generator=_seeded(p)))),
        2 * N,
    ),
    "DistributedSampler of one": (
        lambda _: _loader(DistributedSampler(DATA, num_replicas=1, rank=0)),
        N,
    ),
    "a Dataset": (lambda _: Rows(), N),
}


@pytest.mark.parametrize("kind", SHARED)
@row("a `Subset`, `batch_sampler=`, random, weighted or replacement sampler", "shared", "as drawn")
def test_what_the_sampler_draws_is_drawn_once(kind: str) -> None:
    make, count = SHARED[kind]

    def source(peer: int) -> Any:
        torch.manual_seed(peer)
        random.seed(peer)
        np.random.seed(peer)
        return make(peer)

    alone = values(Peers("a").draw({"a": source(0)}))
    peers = Peers(*PEERS)
    drawn = peers.draw({name: source(place) for place, name in enumerate(PEERS)})
    assert sorted(values(drawn)) == sorted(alone)
    assert len(alone) == count
    assert not peers.tables.differing


def test_fewer_samples_than_peers_are_drawn_once_in_each_epoch() -> None:
    """A peer that finds nothing left begins the next epoch."""
    few = DataLoader(Subset(DATA, [5, 7]), batch_size=4)
    drawn = values(Peers(*PEERS).draw(dict.fromkeys(PEERS, few)))
    assert sorted(drawn) == [5] * (len(drawn) // 2) + [7] * (len(drawn) // 2)


def test_the_order_is_another_in_each_epoch_and_the_users_generators_go_on() -> None:
    peers, generator = Peers("a"), torch.Generator().manual_seed(1)
    source = _loader(WeightedRandomSampler([1.0] * N, N, generator=generator))
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    peers.shares["a"].share(source, "", None, lambda: False)
    assert torch.equal(torch.rand(1), expected)
    first, second = (values(peers.draw({"a": source})) for _ in range(2))
    assert first != second
    assert source.sampler.generator is generator  # type: ignore[attr-defined]


class Stateful(Sampler[int]):
    """Goes on with numbers of its own."""

    def __init__(self) -> None:
        self._random = random.Random(0)

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        return iter(self._random.sample(range(N), N))


class Says(Sampler[int]):
    """Gives as many, whatever it says."""

    def __init__(self, says: int, gives: int) -> None:
        self._says, self._gives = says, gives

    def __len__(self) -> int:
        return self._says

    def __iter__(self) -> Iterator[int]:
        while self._gives:
            yield 0
            self._gives -= self._gives < 100


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
    "DistributedSampler": (
        lambda: _loader(DistributedSampler(DATA, num_replicas=2, rank=0)),
        "DistributedSampler gives this process a part",
    ),
    "within batches": (
        lambda: DataLoader(
            DATA,
            batch_sampler=BatchSampler(DistributedSampler(DATA, num_replicas=2, rank=0), 4, False),
        ),
        "leave it out",
    ),
    "in a list": (
        lambda: _loader(Chained(DistributedSampler(DATA, num_replicas=2, rank=0))),
        "DistributedSampler gives this process a part",
    ),
    "a sampler without a length": (
        lambda: loader(2, 12, sampler=Endless()),
        "Endless has no __len__",
    ),
    "a part for one rank": (_part_of_documents, "leave split_dataset_by_node out"),
    "another order each time": (lambda: _loader(Stateful()), r"set_epoch\(epoch\)"),
    "more than it says": (lambda: _loader(Says(5, 7)), "gives more samples"),
    "without end": (lambda: _loader(Says(5, 100)), "gives more samples"),
    "fewer than it says": (lambda: _loader(Says(7, 5)), "gives fewer samples"),
    "nothing": (lambda: _loader(SubsetRandomSampler([])), "there are no samples"),
    "an empty list": (list, "there are no samples"),
    "no whole batch": (lambda: loader(32, drop_last=True), "no batch of 32"),
    "data without a length": (lambda: DataLoader(Unsized()), "a sampler, or data, that has one"),
    "a dict of loaders": (lambda: {"train": loader()}, "and no dict"),
    "a number": (lambda: 5, "and no int"),
    "a set": (lambda: {"b", "a"}, "sorted"),
    "a loader of another kind": (
        lambda: OwnLoader(DATA),
        "OwnLoader gives batches in a way of its own",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
@row(
    "`DistributedSampler`, a sampler without a fixed order or length, no samples",
    "refused",
    "a line says what to give the loader",
)
def test_what_cannot_be_shared_is_refused(kind: str) -> None:
    make, line = REFUSED[kind]
    with pytest.raises(UsageError, match=line) as refusal:
        Peers("a").draw({"a": make()})
    assert "\n" not in str(refusal.value)


def _split(peer: int) -> DataLoader[Any]:
    torch.manual_seed(peer)
    return DataLoader(random_split(DATA, [N // 2, N // 2])[0])


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
    "the order": lambda p: _loader(SequentialSampler(DATA) if p else list(reversed(range(N)))),
    "batches of what is read from the front": lambda p: DataLoader(Letters(), batch_size=2 + p),
}


@pytest.mark.parametrize("kind", DIFFERENT)
@row(
    "other data or another order on each peer",
    "told",
    "both say so once, and each draws all of its own",
)
def test_other_samples_than_a_peers_are_told_and_drawn_by_each(kind: str) -> None:
    peers = Peers("a", "b")
    sources = {name: DIFFERENT[kind](place) for place, name in enumerate("ab")}
    drawn = peers.draw(sources)
    assert {name: len(each) for name, each in drawn.items()} == {
        name: len(list(source)) for name, source in sources.items()
    }
    told = peers.tables.differing
    assert {name: [each.peer for each in told[name]] for name in told} == {"a": ["b"], "b": ["a"]}


def test_the_last_bits_of_fractions_do_not_count() -> None:
    peers, data = Peers("a", "b"), torch.linspace(0.11, 3, 50)
    peers.draw({"a": DataLoader(TensorDataset(data)), "b": DataLoader(TensorDataset(data + 1e-7))})
    assert not peers.tables.differing


def test_noise_does_not_count_and_what_workers_read_is_not_read_here() -> None:
    peers, noisy = Peers("a", "b"), [Own(noise=1.0), Own(noise=1.0)]
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    for name, data in zip("ab", noisy, strict=True):
        peers.shares[name].share(DataLoader(data), "", None, lambda: False)
    assert torch.equal(torch.random.get_rng_state(), before)
    peers.draw({name: DataLoader(data) for name, data in zip("ab", noisy, strict=True)})
    unread = Own()
    peers.shares["a"].share(DataLoader(unread, num_workers=1), "unread", None, lambda: False)
    assert not peers.tables.differing
    assert unread.read == 0


def test_peers_in_other_sets_of_data_at_a_time_are_not_told() -> None:
    peers = Peers("a", "b")
    train, held_out = loader(length=16), loader(length=8)
    peers.draw({"a": train, "b": loader(length=16)})
    peers.draw({"a": held_out, "b": loader(length=16)})
    peers.draw({"a": train, "b": loader(length=8)})
    peers.draw({"a": train}, name="more")
    assert not peers.tables.differing
