"""What the codecs with a scale for every 128 values have in common.

The encoding is a row of records, one per block of 128 consecutive values:

    scale, bf16, little-endian | 128 codes of `bits` bits, the first in the lowest bits

The last record ends with its last value (the last byte is filled up with zero bits). `ternary`
packs its codes in base 3. Work goes in pieces whose temporaries stay in the cache. All arithmetic
is in integers, in single IEEE operations or in sums that are exact, so every device gives the same
bytes and values. Bytes that no encoder wrote may decode to NaN or infinity: the caller checks
(worker.wire.check_values does).

Rounding to integers, packing two codes into a byte and the noise of stochastic rounding are below.
The noise is counter-based: value i depends on (seed, i) only, through an integer hash in wrapping
int32 arithmetic, so neither the device nor the order of the work changes it.

Blocks of 128 rather than 64 take an eighth of a bit less for a tenth more error, and zstd takes off
twice as much: int4 ends at 3.7 bits instead of 4.0 on pseudo-gradients of the built-in task.

Ref for the noise: two rounds of multiply-xorshift; multipliers from C. Wellons, "Prospecting for
hash functions" (2018). The seed enters before the first and the second round, so that two seeds do
not give two stretches of one sequence.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from algorithms.codecs.base import check_extremes, check_size

BLOCK = 128
SCALE_BYTES = 2
LIMIT = 2.0**127  # above, a rounded scale could overflow
_CACHED_ELEMENTS = 256 * 1024  # 3 MiB of temporaries; with less, the calls cost more than they do
_DEVICE_ELEMENTS = 4 * 1024 * 1024  # accelerators want long kernels
_TO_INTEGERS = 1.5 * 2.0**23  # fp32 numbers around it are the integers
_PAIRS = 256
_WORD = 1 << 32
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B


def piece_rows(row_elements: int, device: torch.device) -> int:
    """How many rows are worked on at a time."""
    elements = _CACHED_ELEMENTS if device.type == "cpu" else _DEVICE_ELEMENTS
    return elements // row_elements


def pieces(rows: int, row_elements: int, device: torch.device) -> Iterator[slice]:
    """Cuts rows into the pieces in which they are worked on."""
    step = piece_rows(row_elements, device)
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


class BlockCodec(ABC):
    """A codec of records; subclasses say what the scale and the codes of a block are."""

    name: str
    wire_id: int
    bits: int
    noise_bits: int
    block_elements = BLOCK
    rounds = True
    unit_bytes = 1
    limit = LIMIT
    scratch_rows = 3  # room to write to, in multiples of the blocks worked on; 3 for noise

    @abstractmethod
    def _scales(
        self,
        blocks: Tensor,
        low: Tensor,
        high: Tensor,
        count: int,
        exact: bool,
        scratch: Tensor,
    ) -> Tensor:
        """Scales (n, 1) of blocks (n, 128), as fp32 that bf16 holds exactly.

        Args:
            low, high: (n, 1), the least and the largest of each block.
            count: the values in each block; zeros fill up the last one.
            exact: the whole block must lie between representable values, as stochastic rounding
                needs; otherwise it is enough that the nearest one is representable.
            scratch: fp32 (`scratch_rows`, n, 128) to write to.
        """

    @abstractmethod
    def _codes(
        self, blocks: Tensor, scales: Tensor, noise: Tensor | None, scratch: Tensor
    ) -> Tensor:
        """Code bytes (n, `code_bytes(128)`) of blocks (n, 128), of any type: of an integer the low
        eight bits count.

        Args:
            noise: int32 (n, 128), uniform in [0, 2^noise_bits); None rounds to nearest.
            scratch: fp32 (2, n, 128) to write to; the answer may lie there.
        """

    @abstractmethod
    def _values(self, codes: Tensor, out: Tensor) -> None:
        """Writes what code bytes of n blocks stand for, before scaling, into `out` (n, 128)."""

    @property
    def _record_bytes(self) -> int:
        return SCALE_BYTES + self.code_bytes(BLOCK)

    def code_bytes(self, elements: int) -> int:
        """Size of the codes of at most one block's values."""
        return (elements * self.bits + 7) // 8

    def encoded_bytes(self, elements: int) -> int:
        whole, rest = divmod(elements, BLOCK)
        return whole * self._record_bytes + (rest > 0) * SCALE_BYTES + self.code_bytes(rest)

    def encode(self, values: Tensor, seed: int | None = None) -> Tensor:
        elements = values.numel()
        raw = torch.empty(self.encoded_bytes(elements), dtype=torch.uint8, device=values.device)
        whole = elements // BLOCK
        blocks = values[: whole * BLOCK].view(whole, BLOCK)
        records = raw[: whole * self._record_bytes].view(whole, self._record_bytes)
        rows = max(1, min(whole, piece_rows(BLOCK, values.device)))
        scratch = values.new_empty(self.scratch_rows, rows, BLOCK)
        extremes = [
            self._encode(blocks[piece], records[piece], BLOCK, seed, piece.start, scratch)
            for piece in pieces(whole, BLOCK, values.device)
        ]
        if rest := elements - whole * BLOCK:
            block = values.new_zeros(1, BLOCK)
            block[0, :rest] = values[whole * BLOCK :]
            record = torch.empty(1, self._record_bytes, dtype=torch.uint8, device=values.device)
            extremes.append(self._encode(block, record, rest, seed, whole, scratch))
            tail = raw[whole * self._record_bytes :]
            tail.copy_(record[0, : tail.numel()])
        if extremes:  # looked at once: that waits for the device
            low, high = torch.stack(extremes).unbind(1)
            check_extremes(self, low.amin().item(), high.amax().item(), self.limit)
        return raw

    def decode(self, raw: Tensor, elements: int) -> Tensor:
        check_size(self, raw, elements)
        values = torch.empty(elements, dtype=torch.float32, device=raw.device)
        whole = elements // BLOCK
        records = raw[: whole * self._record_bytes].view(whole, self._record_bytes)
        blocks = values[: whole * BLOCK].view(whole, BLOCK)
        for piece in pieces(whole, BLOCK, raw.device):
            self._decode(records[piece], blocks[piece])
        if rest := elements - whole * BLOCK:
            tail = raw[whole * self._record_bytes :]
            record = torch.zeros(1, self._record_bytes, dtype=torch.uint8, device=raw.device)
            record[0, : tail.numel()] = tail
            block = values.new_empty(1, BLOCK)
            self._decode(record, block)
            values[whole * BLOCK :] = block[0, :rest]
        return values

    def _encode(
        self,
        blocks: Tensor,
        records: Tensor,
        count: int,
        seed: int | None,
        start: int,
        scratch: Tensor,
    ) -> Tensor:
        """Fills the records; returns the least and the largest value, NaN if any is."""
        scratch = scratch[:, : len(blocks)]
        low, high = blocks.amin(1, keepdim=True), blocks.amax(1, keepdim=True)
        scales = self._scales(blocks, low, high, count, seed is not None, scratch)
        noisy = None
        if seed is not None:
            noisy, spare = scratch[2].view(torch.int32), scratch[0].view(torch.int32)
            fill(noisy, seed, start * BLOCK, self.noise_bits, spare)
        records[:, :SCALE_BYTES] = scales.to(torch.bfloat16).view(torch.uint8)
        records[:, SCALE_BYTES:] = self._codes(blocks, scales, noisy, scratch[:2])
        return torch.stack((low.amin(), high.amax()))

    def _decode(self, records: Tensor, blocks: Tensor) -> None:
        self._values(records[:, SCALE_BYTES:], blocks)
        scales = aligned(records[:, :SCALE_BYTES]).view(torch.bfloat16)
        blocks.mul_(scales.to(torch.float32))


def aligned(raw: Tensor) -> Tensor:
    """A copy that can be viewed as wider elements: `raw` may start and step at odd bytes."""
    return raw.clone(memory_format=torch.contiguous_format)


def to_bf16(scales: Tensor, up: bool) -> Tensor:
    """Positive fp32 rounded to what bf16 holds: up, or to nearest even."""
    if up:
        return ((scales.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)
    return scales.to(torch.bfloat16).to(torch.float32)


def rounded(quotients: Tensor, bits: int, noise: Tensor | None) -> Tensor:
    """Integers modulo 2^bits in the low bits of an int32 (above them: anything).

    By the layout of fp32 alone: no conversion, no branch.

    Args:
        quotients: fp32, at most 2^(bits - 1) in magnitude; overwritten.
        noise: int32, uniform in [0, 2^(23 - bits)): rounds stochastically, without bias but for
            the multiple of 2^(bits - 23) that a quotient is rounded to first. None rounds to
            nearest even.
    """
    if noise is None:
        return quotients.add_(_TO_INTEGERS).view(torch.int32)
    # Within [2^bits, 2^(bits + 1)] fp32 is a fixed-point number with 23 - bits fractional bits.
    fraction = 23 - bits
    fixed = quotients.add_(1.5 * 2.0**bits).view(torch.int32)
    fixed.add_(noise).add_(1 << (bits - 1 + fraction))
    return fixed.bitwise_right_shift_(fraction)


def packed(codes: Tensor, scratch: Tensor) -> Tensor:
    """int32 (n, m) of codes 0 to 15 -> int64 (n, m / 2), a byte each in the low eight bits.

    The first of two codes is in the low half. Both are overwritten; `scratch` is like `codes`.
    """
    pairs = codes.view(torch.int64)  # little-endian: the first code is the low word
    second = torch.bitwise_right_shift(pairs, 28, out=scratch.view(torch.int64))
    return pairs.bitwise_or_(second)


def look_up(codes: Tensor, values: tuple[float, ...], out: Tensor) -> None:
    """Bytes (n, m / 2) -> `out` (n, m): for each code its one of the 16 fp32 `values`."""
    table = _pairs(values, codes.device)
    index = codes.to(torch.int32).view(-1)
    torch.index_select(table, 0, index, out=out.view(torch.float64).view(-1))


@lru_cache(maxsize=32)
def _pairs(values: Sequence[float], device: torch.device) -> Tensor:
    """For each byte its two fp32 values, held as the bits of one float64: moved, never computed."""
    single = torch.tensor(values, dtype=torch.float32, device=device)
    code = torch.arange(_PAIRS, dtype=torch.int64, device=device)
    return single[torch.stack((code & 15, code >> 4), 1)].view(torch.float64).view(-1)


def fill(noise: Tensor, seed: int, start: int, bits: int, scratch: Tensor) -> None:
    """Fills an int32 tensor with values `start`, `start` + 1, ... of the seed's noise.

    Args:
        start: below 2^32, where the sequence starts again.
        bits: 1 to 31; the noise is uniform in [0, 2^bits).
        scratch: like `noise`, to write to.
    """
    before, between = _keys(seed)
    torch.arange(noise.numel(), dtype=torch.int32, device=noise.device, out=noise.view(-1))
    noise.add_(_signed(start)).mul_(_signed(_GOLDEN >> 32)).add_(before)
    _fold(noise, 16, scratch)
    noise.mul_(_signed(_FIRST)).bitwise_xor_(between)
    _fold(noise, 15, scratch)
    noise.mul_(_signed(_SECOND))
    noise.bitwise_right_shift_(32 - bits).bitwise_and_((1 << bits) - 1)


def _fold(words: Tensor, by: int, scratch: Tensor) -> None:
    """words ^= words >> by, shifting zeros in."""
    torch.bitwise_right_shift(words, by, out=scratch)
    words.bitwise_xor_(scratch.bitwise_and_((1 << (32 - by)) - 1))


def _keys(seed: int) -> tuple[int, int]:
    """Two int32 keys of a seed, by the finisher of splitmix64."""
    mixed = (seed * _GOLDEN + _GOLDEN) % (_WORD * _WORD)
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % (_WORD * _WORD)
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % (_WORD * _WORD)
    mixed ^= mixed >> 31
    return _signed(mixed), _signed(mixed >> 32)


def _signed(word: int) -> int:
    """The low 32 bits as a signed number: torch's int32 arithmetic wraps."""
    return (word + _WORD // 2) % _WORD - _WORD // 2
