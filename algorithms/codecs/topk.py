"""The k largest of every 4096 values in two bits each, and their places: a plan must keep the rest.

`topk` has k = 64; `topk32`, `topk128` and `topk256` the k of their names: 0.09 to 0.51 bits a
value. A chunk is 4096 consecutive values of the flattened fragment, where SparseLoCo takes 64x64
tiles of a matrix: the encoding knows no shapes. Of a chunk of n values (the last one may be
smaller) the k' = ceil(n * k / 4096) largest in magnitude are kept, of equal ones the earlier:

    low, high: bf16, little-endian | bits, the first in the lowest bit | zero bits to a byte

Places are Elias-Fano coded, which has one size for all of them: l = log2(4096 / k) low bits of each
as they are, and of the rest a bit set at (place >> l) + i for the i-th one. With k' places in
order, the bits are, k' at a time: 1 for high instead of low; 1 if negative; the lowest bit of each
place, and so on up to l of them; then k' + ceil(n / 2^l) with those that are set. Both levels are
the means of their group of magnitudes, split where the squared error is least. Where fewer than k'
values are kept, the first place fills up: zeros are not kept, nor is anything below 2^-126 or below
k * 2^-44 of the chunk's largest. Sums are in 64-bit fixed point: their order does not matter.

Ref: arXiv:2508.15706 (SparseLoCo), which also has 64 of 4096 and two bits; the levels are ours.
Vigna, "Quasi-succinct indices" (2013), for Elias-Fano; docs/adr/0016 for what it saves.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from murmuration.algorithms.codecs.blocks import LIMIT, aligned, bit_values, bits_of_bytes, pieces
from murmuration.algorithms.codecs.codec import Codec

CHUNK = 4096
_LEVEL_BYTES = 4
_LEAST_NORMAL = 0x00800000  # the bits of 2^-126
_SUM_BITS = 52  # of k numbers in fixed point, each of which may be twice its power of two
_LEAST_FIXED = 1 << 8  # what bf16 still holds exactly in fixed point
_MAGNITUDE = 0x7FFFFFFF
_GROUPS = 512  # of a whole chunk


class TopK(Codec):
    """No bound on single values: a dropped one, at most as large as the least kept, becomes zero.

    Of a chunk x of which s is kept, the decoded q has |x - q|^2 <= |x|^2 - |q|^2 * (1 - 2^-6) and
    |q|^2 >= (sum of |s|)^2 / k * (1 - 2^-6): it never points away. Most is left out; with k = 64
    the relative RMS error of gaussian / Student-t with 5 / with 3 degrees of freedom is 0.939 /
    0.881 / 0.788 (exact kept values: 0.938 / 0.878 / 0.775; one level: 0.939 / 0.889 / 0.832).
    Args: k: values kept of 4096; a power of two, at most 256."""

    block_elements = CHUNK
    limit = LIMIT

    def __init__(self, name: str = "topk", wire_id: int = 7, k: int = 64) -> None:
        self.name, self.wire_id, self.k = name, wire_id, k
        self._low_bits = (CHUNK // k).bit_length() - 1
        self._fixed_bits = _SUM_BITS - k.bit_length() + 1  # of a chunk's largest

    def encoded_bytes(self, elements: int) -> int:
        whole, rest = divmod(elements, CHUNK)
        return whole * self._chunk_bytes(CHUNK) + self._chunk_bytes(rest)

    def encode(self, values: Tensor) -> Tensor:
        self.check_range(values)
        size = self.encoded_bytes(values.numel())
        raw = torch.empty(size, dtype=torch.uint8, device=values.device)
        for chunks, records in self._rows(values, raw):
            for piece in pieces(len(chunks), CHUNK, values.device):
                self._encode(chunks[piece], records[piece])
        return raw

    def decode(self, raw: Tensor, elements: int) -> Tensor:
        """Places past the end of the last chunk, which are never encoded, count as its last. The
        levels may be anything: the caller checks that they are finite."""
        self.check_size(raw, elements)
        values = torch.zeros(elements, dtype=torch.float32, device=raw.device)
        for chunks, records in self._rows(values, raw):
            for piece in pieces(len(chunks), CHUNK, raw.device):
                self._decode(records[piece], chunks[piece])
        return values

    def _kept(self, elements: int) -> int:
        return -(-elements * self.k // CHUNK)

    def _bits(self, elements: int) -> int:
        """The bits of a chunk without its levels."""
        return self._kept(elements) * (self._low_bits + 3) + -(-elements >> self._low_bits)

    def _chunk_bytes(self, elements: int) -> int:
        return (elements > 0) * _LEVEL_BYTES + -(-self._bits(elements) // 8)

    def _rows(self, values: Tensor, raw: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The whole chunks and, apart, the smaller last one, as rows beside their encodings."""
        whole, rest = divmod(values.numel(), CHUNK)
        size = self._chunk_bytes(CHUNK)
        cut, raw_cut = whole * CHUNK, whole * size
        rows = [(values[:cut].view(whole, CHUNK), raw[:raw_cut].view(whole, size))]
        if rest:
            last = raw[raw_cut:].view(1, self._chunk_bytes(rest))
            rows.append((values[cut:].view(1, rest), last))
        return rows

    def _encode(self, chunks: Tensor, records: Tensor) -> None:
        rows, elements = chunks.shape
        if not rows:
            return
        kept, planes = self._kept(elements), self._low_bits + 2
        bits = chunks.view(torch.int32)
        chosen = _largest(bits, kept)
        values = bits.reshape(-1).index_select(0, chosen).view(rows, kept)
        low, high, is_high, is_kept = _levels(values & _MAGNITUDE, self._fixed_bits)
        # A row that is not whole is alone, so its places are below CHUNK too: 14 bits in all.
        places = (chosen & CHUNK - 1).to(torch.int16).view(rows, kept)
        places = places << 2 | (values >> 30 & 2 | is_high).to(torch.int16)
        if is_kept is not None:
            unused = elements << 2
            first = torch.where(is_kept, places, unused).amin(1, keepdim=True)
            places = torch.where(is_kept, places, torch.where(first == unused, 0, first))
            places = places.sort(dim=1).values
        width, device, low_bits = -(-self._bits(elements) // 8) * 8, chunks.device, planes * kept
        row = torch.zeros(rows, width, dtype=torch.uint8, device=device)
        shifts = torch.arange(planes, dtype=torch.int16, device=device)[:, None]
        row[:, :low_bits].view(rows, planes, kept).copy_(places[:, None, :] >> shifts & 1)
        offset = torch.arange(low_bits, low_bits + kept, dtype=torch.int64, device=device)
        row.scatter_(1, (places >> planes) + offset, 1)
        levels = torch.cat((low, high), 1).to(torch.bfloat16).view(torch.uint8)
        if _is_on_host(row):
            packed = torch.from_numpy(np.packbits(row.numpy().reshape(-1), bitorder="little"))
        else:  # sums of powers of two below 2^8: exact in any order
            packed = torch.mv(row.view(-1, 8).to(torch.float32), bit_values(device)).to(torch.uint8)
        records[:, :_LEVEL_BYTES], records[:, _LEVEL_BYTES:] = levels, packed.view(rows, -1)

    def _decode(self, records: Tensor, chunks: Tensor) -> None:
        """Writes what records (n, bytes) keep into chunks (n, m) of zeros."""
        rows, elements = chunks.shape
        if not rows:
            return
        kept, planes = self._kept(elements), self._low_bits + 2
        levels = aligned(records[:, :_LEVEL_BYTES]).view(torch.bfloat16).to(torch.float32)
        packed = records[:, _LEVEL_BYTES:].to(torch.int32).reshape(-1)
        # The eight bits of a byte are moved as one int64.
        bits = torch.index_select(bits_of_bytes(records.device).view(torch.int64)[:, 0], 0, packed)
        bits = bits.view(torch.uint8).view(rows, -1)[:, : self._bits(elements)]
        upper = bits[:, planes * kept :].contiguous()
        if not (upper.sum(1) == kept).all():
            raise ValueError(f"{self.name}: the bits do not say {kept} places of {elements}")
        found = _places_set(upper).view(rows, kept)
        width, device = upper.shape[1], chunks.device
        start = torch.arange(0, rows * width, width, dtype=torch.int64, device=device)[:, None]
        above = found - start - torch.arange(kept, dtype=torch.int64, device=device)
        of_plane, index = bits[:, : planes * kept].view(rows, planes, kept), above << self._low_bits
        for place in range(self._low_bits):
            index.add_(of_plane[:, place + 2], alpha=1 << place)
        magnitudes = levels.gather(1, of_plane[:, 0].to(torch.int64))
        values = torch.where(of_plane[:, 1].to(torch.bool), -magnitudes, magnitudes)
        chunks.scatter_(1, index.clamp_(max=elements - 1), values)


def _largest(bits: Tensor, kept: int) -> Tensor:
    """The flat places, in order, of the `kept` largest magnitudes of each row of fp32 (n, m), as
    int32; of equal ones the first."""
    if not _is_on_host(bits):
        whole = bits & _MAGNITUDE
        least_of = torch.topk(whole, kept, dim=1, sorted=False).values.amin(1, keepdim=True)
        return _at_least(whole, least_of, kept)
    magnitudes = np.bitwise_and(bits.numpy(), _MAGNITUDE)
    places = np.flatnonzero(magnitudes >= _bound(magnitudes, kept))
    rows, elements = magnitudes.shape
    counts = np.diff(np.searchsorted(places, np.arange(rows + 1) * elements))
    values = magnitudes.reshape(-1)[places]
    beside = np.zeros((rows, max(kept, counts.max())), np.int32)
    beside[np.arange(beside.shape[1]) < counts[:, None]] = values
    beside.partition(-kept, axis=1)
    least = beside[:, -kept]
    found = places[values >= np.repeat(least, counts)]
    if len(found) == rows * kept and least.all():
        return torch.from_numpy(found)
    return _at_least(torch.from_numpy(magnitudes), torch.from_numpy(least[:, None]), kept)


def _is_on_host(values: Tensor) -> bool:
    """Tells whether numpy, which is faster there, takes the place of torch."""
    return values.device.type == "cpu"


def _bound(magnitudes: NDArray[np.int32], kept: int) -> NDArray[np.int32]:
    """A bound that the `kept` largest of each row (n, m) reach and few others: (n, 1), at least 1.
    As many groups of values have a largest one that reaches it. There are fewer groups to order."""
    rows, elements = magnitudes.shape
    groups = elements if elements % _GROUPS else _GROUPS
    # numpy finds the places of more than a tenth of all without branches: faster than just below.
    rank = kept if kept < groups // 2 else groups * 5 // 8
    maxima: NDArray[np.int32] = magnitudes.reshape(rows, -1, groups).max(axis=1)
    maxima.partition(-rank, axis=1)
    return maxima[:, -rank, None].clip(min=1)


def _at_least(magnitudes: Tensor, least: Tensor, kept: int) -> Tensor:
    """The flat places, in order, of what reaches the least that is kept; of equals the first."""
    chosen = magnitudes >= least
    found = _places_set(chosen)
    if found.numel() == len(magnitudes) * kept:
        return found
    above, equal = magnitudes > least, magnitudes == least
    lacking = kept - above.sum(1, keepdim=True)
    return _places_set(above | equal & (equal.cumsum(1) <= lacking))


def _places_set(bits: Tensor) -> Tensor:
    """The flat indices of what is not zero, in order: int64, 1-D."""
    if _is_on_host(bits):
        return torch.from_numpy(np.flatnonzero(bits.numpy()))
    return bits.reshape(-1).nonzero().view(-1)


def _levels(magnitudes: Tensor, fixed_bits: int) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Two levels for each row of magnitudes: int32 (n, k), the bits of fp32.

    Returns:
        low, high: fp32 (n, 1), rounded to bf16; equal if one is enough, 0 if nothing is kept.
        is_high, is_kept: bool (n, k); None for is_kept where all are."""
    if _is_on_host(magnitudes):
        ordered = torch.from_numpy(np.sort(-magnitudes.numpy(), axis=1)).neg_()
    else:
        ordered = magnitudes.sort(dim=1, descending=True).values
    exponent = (ordered[:, :1] >> 23).to(torch.int64)
    # 2^(fixed_bits - exponent) and its inverse, from the bits of float64: exact in products.
    unit = ((1023 + fixed_bits + 126 - exponent) << 52).view(torch.float64)
    unit_back = ((1023 - fixed_bits - 126 + exponent) << 52).view(torch.float64)
    least = (_LEAST_FIXED * unit_back).to(torch.float32).view(torch.int32)
    least.clamp_(min=_LEAST_NORMAL)
    kept = magnitudes.shape[1]
    rank = torch.arange(1, kept + 1, dtype=torch.int64, device=magnitudes.device)
    total: Tensor | int = kept
    is_kept = None
    if not (ordered[:, -1:] >= least).all():
        is_kept = magnitudes >= least
        total = is_kept.sum(1, keepdim=True)
        ordered = ordered * (rank <= total)
    fixed = ordered.view(torch.float32).to(torch.float64).mul_(unit).floor_()
    above = fixed.cumsum(1)  # of integers below 2^53: exact
    below = above[:, -1:] - above
    count, count_below = rank.to(torch.float64), (total - rank).clamp_(min=1).to(torch.float64)
    gain = (above * above).div_(count).add_((below * below).div_(count_below))
    if _is_on_host(gain):  # the first of the largest of each row, (n, 1), on every device
        split = torch.from_numpy(gain.numpy().argmax(1, keepdims=True))
    else:
        split = (gain == gain.amax(1, keepdim=True)).to(torch.uint8).argmax(1, keepdim=True)
    high = above.gather(1, split) / (split + 1)
    low = below.gather(1, split) / (total - split - 1).clamp_(min=1)
    high, low = ((mean * unit_back).to(torch.bfloat16) for mean in (high, low))
    one = (low == 0) | (low == high)
    # The least of the upper group, in fixed point; fp32 holds that exactly.
    least_high = (fixed.gather(1, split) * unit_back).to(torch.float32).view(torch.int32)
    is_high, low = (magnitudes >= least_high) | one, torch.where(one, high, low)
    return low.to(torch.float32), high.to(torch.float32), is_high, is_kept
