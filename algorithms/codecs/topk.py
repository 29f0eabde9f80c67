"""The largest 64 of every 4096 values, in two bits each: 0.23 bits a value, for error feedback.

A chunk is 4096 consecutive values of the flattened fragment, where SparseLoCo takes 64x64 tiles of
a matrix: the encoding knows no shapes. Of a chunk of n values (the last one may be smaller) the
k = ceil(n / 64) largest in magnitude are kept; of equal ones the earlier. Its encoding:

    low, high: bf16, little-endian | k indices of 12 bits | k codes of 2 bits | zero bits to a byte

Each row of bits starts at a byte with the lowest bit first. Code: 1 for high instead of low, plus 2
if negative. Both levels are the means of their group of magnitudes, split where the squared error
is least. Places are in the order of their index; those left over where fewer than k values are
kept, which holds for zeros and for anything below 2^-126 or below 2^-38 of the chunk's largest,
repeat the first.

Sums are in 64-bit fixed point, so that their order does not matter.

Ref: arXiv:2508.15706 (SparseLoCo), which also has 64 of 4096 and two bits; the levels are ours.
"""

import torch
from torch import Tensor

from algorithms.codecs.base import check_range, check_size
from algorithms.codecs.blocks import LIMIT, aligned, pieces

CHUNK = 4096
ONE_IN = 64
_INDEX_BITS = 12
_LEVEL_BYTES = 4
_LEAST_NORMAL = 2.0**-126
_FIXED_BITS = 46  # of the largest magnitude; 64 of these fit in a float64's 53 bits
_LEAST_FIXED = 1 << 8  # what bf16 still holds exactly in fixed point
_UNUSED = 1 << 30


class TopK:
    """No bound on single values: a dropped one, at most as large as the least kept, becomes zero.

    Of a chunk x of which s is kept, the decoded q has |x - q|^2 <= |x|^2 - |q|^2 * (1 - 2^-6) and
    |q|^2 >= (sum of |s|)^2 / k * (1 - 2^-6): it never points away. Without error feedback most is
    lost, relative RMS error of gaussian / Student-t with 5 / with 3 degrees of freedom: 0.939 /
    0.881 / 0.788 (exact kept values: 0.938 / 0.878 / 0.775; one level: 0.939 / 0.889 / 0.832).
    Biased by its nature, so there is no stochastic rounding.
    """

    name = "topk"
    wire_id = 7
    block_elements = CHUNK
    rounds = False
    unit_bytes = 1
    limit = LIMIT

    def encoded_bytes(self, elements: int) -> int:
        whole, rest = divmod(elements, CHUNK)
        return whole * _chunk_bytes(CHUNK) + _chunk_bytes(rest)

    def encode(self, values: Tensor, seed: int | None = None) -> Tensor:
        check_range(self, values, self.limit)
        elements = values.numel()
        raw = torch.empty(self.encoded_bytes(elements), dtype=torch.uint8, device=values.device)
        for chunks, records in _rows(values, raw):
            for piece in pieces(len(chunks), CHUNK, values.device):
                _encode(chunks[piece], records[piece])
        return raw

    def decode(self, raw: Tensor, elements: int) -> Tensor:
        """Indices past the end of the last chunk, which are never encoded, count as its last.

        The levels may be anything: the caller checks that they are finite.
        """
        check_size(self, raw, elements)
        values = torch.zeros(elements, dtype=torch.float32, device=raw.device)
        for chunks, records in _rows(values, raw):
            for piece in pieces(len(chunks), CHUNK, raw.device):
                _decode(records[piece], chunks[piece])
        return values


def _kept(elements: int) -> int:
    return -(-elements // ONE_IN)


def _chunk_bytes(elements: int) -> int:
    kept = _kept(elements)
    return (kept > 0) * _LEVEL_BYTES + -(-kept * _INDEX_BITS // 8) + -(-kept * 2 // 8)


def _rows(values: Tensor, raw: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The whole chunks and, apart, the smaller last one, as rows beside their encodings."""
    whole, rest = divmod(values.numel(), CHUNK)
    cut, raw_cut = whole * CHUNK, whole * _chunk_bytes(CHUNK)
    rows = [(values[:cut].view(whole, CHUNK), raw[:raw_cut].view(whole, _chunk_bytes(CHUNK)))]
    if rest:
        rows.append((values[cut:].view(1, rest), raw[raw_cut:].view(1, _chunk_bytes(rest))))
    return rows


def _encode(chunks: Tensor, records: Tensor) -> None:
    """Fills records (n, bytes) from chunks (n, m)."""
    elements = chunks.shape[1]
    kept = _kept(elements)
    # Magnitude above, index below, from the end so that the earlier is larger: no two are equal.
    keys = (chunks.view(torch.int32) & 0x7FFFFFFF).to(torch.int64).bitwise_left_shift_(_INDEX_BITS)
    keys.bitwise_or_(torch.arange(CHUNK - 1, CHUNK - 1 - elements, -1, device=chunks.device))
    largest = torch.topk(keys, kept, dim=1).values
    index = CHUNK - 1 - (largest & (CHUNK - 1))
    magnitudes = (largest >> _INDEX_BITS).to(torch.int32).view(torch.float32)
    low, high, is_high, is_kept = _levels(magnitudes)
    codes = is_high + 2 * (chunks.gather(1, index) < 0)
    places = torch.where(is_kept, index << 2 | codes, _UNUSED).sort(dim=1).values
    first = torch.where(places[:, :1] == _UNUSED, 0, places[:, :1])
    places = torch.where(places == _UNUSED, first, places)
    levels = torch.cat((low, high), 1).to(torch.bfloat16).view(torch.uint8)
    parts = (levels, _bytes_of(places >> 2, _INDEX_BITS), _bytes_of(places & 3, 2))
    torch.cat(parts, 1, out=records)


def _levels(magnitudes: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two levels for each row of magnitudes (n, k), which descend.

    Returns:
        low, high: fp32 (n, 1), rounded to bf16; equal if one is enough, 0 if nothing is kept.
        is_high, is_kept: bool (n, k).
    """
    normal = torch.where(magnitudes < _LEAST_NORMAL, 0.0, magnitudes).to(torch.float64)
    exponent = (magnitudes[:, :1].contiguous().view(torch.int32) >> 23).to(torch.int64)
    # 2^(46 - exponent) and its inverse, from the bits of float64: products with them are exact.
    unit = ((1023 + _FIXED_BITS + 126 - exponent) << 52).view(torch.float64)
    unit_back = ((1023 - _FIXED_BITS - 126 + exponent) << 52).view(torch.float64)
    fixed = (normal * unit).to(torch.int64)
    is_kept = fixed >= _LEAST_FIXED
    fixed = torch.where(is_kept, fixed, 0)
    total = is_kept.sum(1, keepdim=True)
    rank = torch.arange(1, fixed.shape[1] + 1, device=fixed.device)
    above = fixed.cumsum(1)
    below = (above[:, -1:] - above).to(torch.float64)
    count_below = (total - rank).clamp(min=1).to(torch.float64)
    sums, counts = above.to(torch.float64), rank.to(torch.float64)
    gain = sums * sums / counts + below * below / count_below
    best = gain == gain.amax(1, keepdim=True)
    split = (best.cumsum(1) == 0).sum(1, keepdim=True)  # where the first of the best is
    high = ((sums / counts).gather(1, split) * unit_back).to(torch.bfloat16)
    low = ((below / count_below).gather(1, split) * unit_back).to(torch.bfloat16)
    one = (low == 0) | (low == high)
    is_high = (rank <= split + 1) | one
    low = torch.where(one, high, low)
    return low.to(torch.float32), high.to(torch.float32), is_high, is_kept


def _decode(records: Tensor, chunks: Tensor) -> None:
    """Writes what records (n, bytes) keep into chunks (n, m) of zeros."""
    elements = chunks.shape[1]
    kept = _kept(elements)
    codes_at = _LEVEL_BYTES + -(-kept * _INDEX_BITS // 8)
    levels = aligned(records[:, :_LEVEL_BYTES]).view(torch.bfloat16).to(torch.float32)
    index = _numbers_of(records[:, _LEVEL_BYTES:codes_at], _INDEX_BITS, kept)
    codes = _numbers_of(records[:, codes_at:], 2, kept)
    magnitudes = levels.gather(1, codes & 1)
    chunks.scatter_(
        1, index.clamp_(max=elements - 1), torch.where(codes < 2, magnitudes, -magnitudes)
    )


def _bytes_of(numbers: Tensor, bits: int) -> Tensor:
    """int64 (n, k) below 2^bits -> uint8 (n, ceil(k * bits / 8)), the lowest bits first."""
    rows, count = numbers.shape
    each = 24 // bits  # three bytes hold a whole number of them
    padded = torch.nn.functional.pad(numbers, (0, -count % each)).view(rows, -1, each)
    shifts = torch.arange(0, 24, bits, device=numbers.device)
    words = (padded << shifts).sum(2, keepdim=True)
    split = words >> torch.arange(0, 24, 8, device=numbers.device) & 255
    return split.to(torch.uint8).view(rows, -1)[:, : -(-count * bits // 8)]


def _numbers_of(raw: Tensor, bits: int, count: int) -> Tensor:
    """The inverse of `_bytes_of`."""
    rows, size = raw.shape
    padded = torch.nn.functional.pad(raw.to(torch.int64), (0, -size % 3)).view(rows, -1, 3)
    words = (padded << torch.arange(0, 24, 8, device=raw.device)).sum(2, keepdim=True)
    numbers = words >> torch.arange(0, 24, bits, device=raw.device) & (1 << bits) - 1
    return numbers.view(rows, -1)[:, :count]
