"""Fragments: named sets of parameters that are exchanged as a unit, and their shards."""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

Ranges = tuple[tuple[int, int], ...]  # (start, stop) of values, in order

_LAYERS_EACH = 3
_FEWEST = 4
PIECE_ELEMENTS = 1 << 22  # 16 MiB of fp32
_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


@dataclass(frozen=True)
class TensorSpec:
    """One parameter, as every peer of a run must have it."""

    name: str
    shape: tuple[int, ...]
    averaged: bool = False  # a running statistic
    # The type of one that travels bit for bit in limbs: the first contributor's are taken.
    integers: torch.dtype | None = None

    @property
    def elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Fragment:
    """A set of parameters that travels together, in the order of the schema: integers last."""

    index: int
    specs: tuple[TensorSpec, ...]

    @property
    def elements(self) -> int:
        return sum(spec.elements for spec in self.specs)

    @property
    def exact(self) -> int:
        """How many of the last values are limbs of integers, which travel as they are."""
        return sum(spec.elements for spec in self.specs if spec.integers is not None)

    @property
    def averaged(self) -> Ranges:
        """The ranges of values that change without an outer optimizer."""
        stops = itertools.accumulate(spec.elements for spec in self.specs)
        ends = zip(self.specs, stops, strict=True)
        return union(((stop - spec.elements, stop) for spec, stop in ends if spec.averaged), ())

    def empty(self) -> Tensor:
        """A fresh 1-D fp32 tensor on the CPU, to hold the fragment's `elements` values."""
        return torch.empty(self.elements, dtype=torch.float32, device="cpu")

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Copies the fragment's tensors into one fresh 1-D fp32 tensor on the CPU. They may be on
        any device and of any type, integers in limbs or in their own shape."""
        flat = self.empty()
        for name, view in self.views(flat).items():
            copy_values(view, tensors[name])
        return flat

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Views into `flat` (1-D, `elements` values), by parameter name and in its shape."""
        if flat.shape != (self.elements,):
            raise ValueError(
                f"fragment {self.index} has {self.elements} elements, got shape {tuple(flat.shape)}"
            )
        parts = torch.split(flat, [spec.elements for spec in self.specs])
        return {s.name: part.view(s.shape) for s, part in zip(self.specs, parts, strict=True)}

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """As `views`, but integers are fresh tensors of their own type and shape."""
        found = self.views(flat)
        for spec in self.specs:
            if spec.integers is not None:
                found[spec.name] = integers_of(found[spec.name], spec.integers)
        return found


def limbs_of(integers: Tensor) -> Tensor:
    """A view of some integers, or of values of another type, in parts of 16 bits or fewer, which
    fp32 holds exactly; one more dimension than they have. Writing into it writes into them."""
    limb = torch.int16 if integers.dtype.itemsize > 1 else torch.uint8
    return integers.unsqueeze(-1).view(limb)


def integers_of(limbs: Tensor, kind: torch.dtype) -> Tensor:
    """The integers whose limbs these are, in fp32 or as `limbs_of` gives them; fresh."""
    limb = torch.int16 if kind.itemsize > 1 else torch.uint8
    return limbs.to(limb, copy=True).view(kind).squeeze(-1)


def copy_values(into: Tensor, values: Tensor) -> None:
    """Copies a tensor of a fragment; integers that are in their own shape as limbs."""
    into.copy_(limbs_of(values) if values.dim() < into.dim() else values)


def layer_of(name: str) -> int | None:
    """The layer index in a parameter name: its first numeric component; None outside the layers."""
    found = _LAYER.search(name)
    return int(found.group(1)) if found else None


def partition(
    schema: Sequence[TensorSpec], fragments: int, pattern: str = "strided"
) -> tuple[Fragment, ...]:
    """Cuts a model into fragments; every parameter is in exactly one. Raises ValueError: fewer
    layers than fragments. Args: schema: every parameter, in the model's order; fragments: 1 puts
    all into one; P > 1 makes P fragments of layers and, after them, one of what is outside the
    layers; 0 takes three layers a fragment as the paper does, but at least four fragments where
    there are as many layers; pattern: `strided` puts layer l into fragment l mod P, `sequential`
    cuts runs of layers.

    Ref: arXiv:2501.18512 section 2.2."""
    layers = sorted({layer for spec in schema if (layer := layer_of(spec.name)) is not None})
    if fragments == 0:
        fragments = max(1, min(len(layers), max(_FEWEST, -(-len(layers) // _LAYERS_EACH))))
    if fragments == 1:
        return (Fragment(0, tuple(schema)),)
    if fragments < 1 or fragments > len(layers):
        raise ValueError(f"{fragments} fragments of {len(layers)} layers; use 1 to {len(layers)}")
    rank = {layer: position for position, layer in enumerate(layers)}
    groups: list[list[TensorSpec]] = [[] for _ in range(fragments + 1)]
    for spec in schema:
        layer = layer_of(spec.name)
        if layer is None:
            groups[fragments].append(spec)
        elif pattern == "strided":
            groups[rank[layer] % fragments].append(spec)
        else:
            groups[rank[layer] * fragments // len(layers)].append(spec)
    filled = [group for group in groups if group]
    return tuple(Fragment(index, tuple(group)) for index, group in enumerate(filled))


def pieces(schema: Sequence[TensorSpec], elements: int) -> tuple[Fragment, ...]:
    """Cuts a model that is exchanged as a whole into runs of whole tensors of at most so many
    elements; a tensor that has more is a piece of its own. A round needs memory for one piece."""
    runs: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in schema:
        if runs[-1] and filled + spec.elements > elements:
            runs.append([])
            filled = 0
        runs[-1].append(spec)
        filled += spec.elements
    return tuple(Fragment(index, tuple(run)) for index, run in enumerate(runs))


def shard_bounds(elements: int, shards: int, align: int) -> tuple[tuple[int, int], ...]:
    """Cuts `elements` values into `shards` ranges, some of which may be empty. Inner bounds are
    multiples of `align`, so that block codecs see the same blocks; else the cut is even."""
    cuts = [min(elements, round(elements * k / shards / align) * align) for k in range(shards)]
    cuts.append(elements)
    return tuple(itertools.pairwise(cuts))


def union(some: Iterable[tuple[int, int]], others: Iterable[tuple[int, int]]) -> Ranges:
    """The ranges that cover what either covers, in order."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted((*some, *others)):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)


def complement(ranges: Iterable[tuple[int, int]], elements: int) -> Ranges:
    """The ranges of 0..elements that are in none of these, which are in order."""
    at, rest = 0, []
    for start, stop in ranges:
        rest.append((at, start))
        at = stop
    rest.append((at, elements))
    return tuple((start, stop) for start, stop in rest if start < stop)
