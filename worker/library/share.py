"""A share of the samples for each peer, without talking about it."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

T = TypeVar("T")


@dataclass(frozen=True)
class SharePosition:
    """Where a process stands: the `mine`-th of `peers` by name, and of its site's `ranks`."""

    mine: int
    peers: int
    rank: int = 0
    ranks: int = 1


def share(loader: Iterable[T], seed: int, place: Callable[[], SharePosition]) -> Iterator[T]:
    """Batch n is the peer's whose place is n modulo their number, at the time it is drawn. Of a
    site of several ranks each takes one of so many in a row.

    As long as nobody joins or leaves, every batch is drawn by exactly one peer.

    Args:
        loader: batches, the same on every peer. Of a `DataLoader` over a data set with indices the
            random order, if it has one, is replaced by one that follows from `seed` and the epoch.
        place: at the time that it is called.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        yield from _mine(loader, place)
        return
    epoch = _epochs_begun(loader)
    shared: DataLoader[Any] = DataLoader(
        loader.dataset,
        batch_sampler=_Share(loader, seed + epoch, place),
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        worker_init_fn=loader.worker_init_fn,
    )
    yield from shared


def _epochs_begun(loader: Any) -> int:
    begun = getattr(loader, "_murmuration_epochs", 0)
    loader._murmuration_epochs = begun + 1
    return int(begun)


class _Share(BatchSampler):
    """The batches of indices that are this peer's."""

    def __init__(
        self, loader: DataLoader[Any], seed: int, place: Callable[[], SharePosition]
    ) -> None:
        self._loader, self._seed, self._place = loader, seed, place

    def __iter__(self) -> Iterator[list[int]]:
        loader = self._loader
        batches: Iterable[list[int]] = loader.batch_sampler or ([i] for i in loader.sampler)
        sampler = getattr(batches, "sampler", loader.sampler)
        if isinstance(sampler, RandomSampler):
            generator = torch.Generator().manual_seed(self._seed)
            order = torch.randperm(len(loader.dataset), generator=generator).tolist()  # type: ignore[arg-type]
            batches = BatchSampler(order, loader.batch_size or 1, loader.drop_last)
        yield from _mine(batches, self._place)

    def __len__(self) -> int:
        place = self._place()
        return len(self._loader) // (place.peers * place.ranks)


def _mine(items: Iterable[T], place: Callable[[], SharePosition]) -> Iterator[T]:
    """As many to each rank of a site: what is left over in the end is nobody's."""
    group: list[T] = []
    number = 0
    for item in items:
        group.append(item)
        here = place()
        if len(group) < here.ranks:
            continue
        if number % here.peers == here.mine:
            yield group[here.rank]
        group.clear()
        number += 1
