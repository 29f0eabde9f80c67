"""Samples that can be drawn in any order, and the order of each epoch, the same on every peer.

A sampler is asked for its order with every generator that it can draw from seeded by the run and
the epoch. That two peers have other data, or samplers that differ, nobody can see: so a hash of the
order and of what is cheap to read of the data names the stream.
"""

import gc
import random
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from hashlib import sha256
from itertools import chain, islice
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils import data as torch_data

from murmuration.worker.errors import UsageError
from murmuration.worker.leases import Run, SampleStream
from murmuration.worker.training.device import random_states_kept

T = TypeVar("T")

_Order = Sequence[Any]

# Of a loader, beside its data and its samplers.
_KEPT = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn"),
    *("multiprocessing_context", "generator", "prefetch_factor"),
)
_PARTS = ("num_replicas", "num_processes", "world_size")  # of samplers that give a part of the data
_MOST_HELD = 64  # of a list that a sampler holds
_LOOKED_AT = 8  # items of the data, and values of an item


class Indexed(Generic[T]):
    """Samples that can be drawn in any order. Args: order: of an epoch: what `load` takes, by
    position; data: from an order, what tells the data from other data that is as long; batch:
    positions of a batch; load: from what is drawn, batch by batch, to what the loop is given."""

    def __init__(
        self,
        order: Callable[[int], _Order],
        load: Callable[[Iterator[list[Any]]], Iterable[T]],
        data: Callable[[_Order], str],
        batch: int = 1,
        drop_last: bool = False,
    ) -> None:
        self.load, self.batch, self.drop_last = load, batch, drop_last
        self._order = order
        first = order(0)
        self._orders, self._length = {0: first}, len(first)
        self.mark = f"{data(first)}/{_hash_of(first)}"

    def __len__(self) -> int:
        return self._length

    def batches(self, ranks: int = 1) -> int:
        at_once = self.batch * ranks
        return (self._length + (0 if self.drop_last else at_once - 1)) // at_once

    def places(self, run: Run, stream: SampleStream) -> list[Any]:
        if run.epoch not in self._orders:
            self._orders = {e: o for e, o in self._orders.items() if e == run.epoch - 1}
            self._orders[run.epoch] = self._order(run.epoch)
        first = run.block.place * stream.block
        return list(self._orders[run.epoch][first + run.begin : first + run.end])


def indexed(source: Iterable[T], seed: int) -> Indexed[T] | None:
    """None for what can only be iterated. Raises UsageError: peers cannot have one order."""
    found: Indexed[Any] | None = None
    kind = type(source).__name__
    if isinstance(source, Set):
        raise UsageError(
            f"swarm.shard: a {kind} has another order in each process; share sorted(...) of it"
        )
    iterated = hasattr(source, "__iter__") or hasattr(source, "__getitem__")
    if isinstance(source, Mapping) or not iterated:
        raise UsageError(
            f"swarm.shard takes a DataLoader, a sequence or what gives batches, and no {kind}"
        )
    if getattr(getattr(source, "dataset", source), "_distributed", None) is not None:
        raise UsageError("swarm.shard shares all samples out: leave split_dataset_by_node out")
    held = source.dataset if isinstance(source, torch_data.DataLoader) else source
    if isinstance(held, torch_data.IterableDataset):
        return None
    if isinstance(source, torch_data.DataLoader):
        found = _of_loader(source, seed)
    elif isinstance(source, Sequence | torch_data.Dataset) and hasattr(source, "__len__"):
        items: Any = source
        found = Indexed(
            lambda _: range(len(items)),
            lambda drawn: (items[i] for i, *_ in drawn),
            lambda order: _content_of(items, order, in_workers=False),
        )
    if found is not None and not found.batches():
        there = f"there are no samples, or no batch of {found.batch}"
        raise UsageError(f"swarm.shard: {there}; give the loader more, or a smaller batch_size")
    return found


def _of_loader(loader: torch_data.DataLoader[Any], seed: int) -> Indexed[Any]:
    for name in ("__iter__", "_get_iterator"):
        own = getattr(type(loader), name) is not getattr(torch_data.DataLoader, name)
        if own and not type(loader).__module__.startswith("torchdata."):  # its batches are torch's
            raise UsageError(
                f"swarm.shard: {type(loader).__name__} gives batches in a way of its own, which "
                "would be lost; give a plain torch.utils.data.DataLoader over the same data"
            )
    batches = loader.batch_sampler
    own_batches = batches is not None and type(batches) is not torch_data.BatchSampler
    size, drop_last, sampler = 1, False, batches if own_batches else loader.sampler
    if isinstance(batches, torch_data.BatchSampler) and not own_batches:
        size, drop_last, sampler = batches.batch_size, batches.drop_last, batches.sampler

    def load(drawn: Iterator[list[Any]]) -> Iterable[Any]:
        kept = {name: getattr(loader, name) for name in _KEPT}
        if batches is None:
            flat = chain.from_iterable(drawn)
            return torch_data.DataLoader(loader.dataset, batch_size=None, sampler=flat, **kept)
        chosen = (batch for batch, *_ in drawn) if own_batches else drawn
        return torch_data.DataLoader(loader.dataset, batch_sampler=chosen, **kept)

    def content(order: _Order) -> str:
        return _content_of(loader.dataset, order, in_workers=loader.num_workers > 0)

    found = Indexed(_order_of(sampler, seed), load, content, size, drop_last)
    return found


def _order_of(sampler: Any, seed: int) -> Callable[[int], _Order]:
    name, parts = type(sampler).__name__, list(_samplers_in(sampler))
    try:
        length = len(sampler)
    except TypeError as error:
        raise UsageError(
            f"{name} has no __len__, so its samples cannot be shared out ({error}); give the "
            "loader a sampler, or data, that has one"
        ) from error
    for each in parts:
        if any(isinstance(n := getattr(each, p, 1), int) and n > 1 for p in _PARTS):
            raise UsageError(
                f"{type(each).__name__} gives this process a part of the samples, and nobody "
                "would draw the others: leave it out, since swarm.shard shares all of them out"
            )

    def order(epoch: int) -> _Order:
        if type(sampler) in (torch_data.SequentialSampler, torch_data.RandomSampler):
            of, again = len(sampler.data_source), getattr(sampler, "replacement", None)
            return _plain_order(length, of, again, seed + epoch)
        with _seeded(seed + epoch, parts):
            for each in parts:
                if (set_epoch := getattr(each, "set_epoch", None)) is not None:
                    set_epoch(epoch)
            given = _compact(list(islice(sampler, length + 1)))
        if len(given) != length:
            than = "more" if len(given) > length else "fewer"
            raise UsageError(
                f"{name} gives {than} samples in epoch {epoch} than the {length} of its __len__: "
                "an epoch that is shared out must be as long as it says"
            )
        return given

    torchs_own = all(type(each).__module__ == torch_data.Sampler.__module__ for each in parts)
    if not torchs_own and _hash_of(order(0)) != _hash_of(order(0)):
        raise UsageError(
            f"{name} gives another order each time it is read, so each peer would have one of its "
            "own: let the order follow from set_epoch(epoch), or use shuffle=True"
        )
    return order


def _samplers_in(sampler: Any) -> Iterator[Any]:
    found, seen = [sampler], set[int]()
    while found:
        each = found.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        kind = type(each)
        if isinstance(each, list | tuple | Mapping):
            values = each.values() if isinstance(each, Mapping) else each
            found += islice(values, _MOST_HELD)
        elif (
            each is sampler
            or isinstance(each, torch_data.Sampler)
            or hasattr(kind, "__iter__") > hasattr(kind, "__getitem__")  # data is indexed
        ):
            yield each
            steps = isinstance(each, Iterator)  # a generator, a zip, a loader's
            found += gc.get_referents(each) if steps else getattr(each, "__dict__", {}).values()


@lru_cache(maxsize=4)  # a loop that breaks off asks again
def _plain_order(length: int, of: int, replacement: bool | None, seed: int) -> _Order:
    """The order of torch's own samplers. Args: replacement: None: in file order."""
    sampler: Any = torch_data.SequentialSampler(range(of))
    if replacement is not None:
        sampler = torch_data.RandomSampler(range(of), replacement, length)
    with _seeded(seed, [sampler]):
        return _compact(list(sampler))


@contextmanager
def _seeded(seed: int, samplers: Iterable[Any]) -> Iterator[None]:
    """Begins at the seed all that samplers draw from; afterwards nothing has been drawn."""
    with drawing(seed, []), torch.device("cpu"), ExitStack() as after:
        for each in samplers:
            for name, value in list(getattr(each, "__dict__", {}).items()):
                if isinstance(value, torch.Generator) or (name == "generator" and value is None):
                    after.callback(setattr, each, name, value)
                    setattr(each, name, torch.Generator("cpu").manual_seed(seed))
        yield


@contextmanager
def drawing(seed: int, states: list[Any]) -> Iterator[None]:
    """Begins at the seed what all draw from, and goes on there when given the same `states`."""
    with random_states_kept(torch.device("cpu")):
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        if states:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.set_rng_state(states[2])
        try:
            yield
        finally:
            states[:] = random.getstate(), np.random.get_state(), torch.get_rng_state()


def _compact(given: list[Any]) -> _Order:
    try:
        return array("q", given)
    except (TypeError, OverflowError):
        return given


def _hash_of(order: _Order) -> str:
    whole = order.tobytes() if isinstance(order, array) else repr(order).encode()
    return sha256(whole).hexdigest()


def _content_of(data: Any, order: _Order, *, in_workers: bool) -> str:
    """A hash of how the data is cut, and of some items, where these are known. Args: in_workers:
    other processes read the data: what this process has opened they cannot share."""
    found, opens_nothing, left = "", True, [data]
    while left:
        match part := left.pop(0):
            case torch_data.Subset():
                found += _hash_of(_compact(list(part.indices)))
                left.insert(0, part.dataset)
            case torch_data.ConcatDataset():
                found += f"{part.cumulative_sizes}"
                left[:0] = part.datasets
            case torch_data.TensorDataset() | list() | tuple() | str() | bytes() | range():
                pass
            case _:
                opens_nothing &= type(part).__module__.startswith("datasets.")
    if not in_workers or opens_nothing:
        found += _items_of(data, [order[place] for place in _places(len(order))])
    return sha256(found.encode()).hexdigest() if found else ""


def _items_of(data: Any, places: list[Any]) -> str:
    """A text of items that are the same each time they are read; empty where they are random."""
    found = []
    for seed in range(2):
        with _seeded(seed, ()):
            try:
                items = [data[place[0] if isinstance(place, list) else place] for place in places]
            except Exception:  # the loop will meet it where it belongs
                return ""
        found.append(told_by(items))
    return found[0] if found[0] == found[1] else ""


def _places(length: int) -> list[int]:
    return sorted({place * length // _LOOKED_AT for place in range(_LOOKED_AT)}) if length else []


def told_by(item: Any) -> str:
    """Fractions are rounded: machines compute them otherwise."""
    match item:
        case Tensor() if item.layout == torch.strided and not (item.is_meta or item.is_nested):
            flat = item.detach().flatten()
            return f"{item.dtype} {tuple(item.shape)} {told_by(flat[_places(len(flat))].tolist())}"
        case dict():
            return told_by([*item, *item.values()])
        case list() | tuple():
            return f"({','.join(told_by(each) for each in item[:_LOOKED_AT])})"
        case float() | complex():
            return f"{item:.2g}"
        case str() | bytes() | int() | None:
            return repr(item)
        case _ if isinstance(getattr(item, "__array_interface__", None), dict):
            return told_by(np.ravel(item)[:_LOOKED_AT].tolist())
        case _:
            return type(item).__name__
