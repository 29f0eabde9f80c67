"""The base of the codecs with a scale for every 128 values; int8, and e3m0 in four bits.

The encoding is a row of records, one per block of 128 consecutive values:

    scale, bf16, little-endian | 128 codes of `bits` bits, the first in the lowest bits

The last record ends with its last value (the last byte is filled up with zero bits). `ternary`
packs its codes in base 3. All arithmetic is in integers, in single IEEE operations or in sums that
are exact, so every device gives the same bytes and values. Bytes that no encoder wrote may decode
to NaN or infinity: the caller checks (murmuration.worker.wire.check_values does).
"""

from abc import abstractmethod
from collections.abc import Iterator
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from murmuration.algorithms.codecs.codec import Codec

BLOCK = 128
SCALE_BYTES = 2
LIMIT = 2.0**127  # above, a rounded scale could overflow
_CACHED_ELEMENTS = 512 * 1024  # a thread; 6 MiB of temporaries; with less, calls cost more
_DEVICE_ELEMENTS = 4 * 1024 * 1024  # accelerators want long kernels


def pieces(rows: int, row_elements: int, device: torch.device) -> Iterator[slice]:
    """Cuts rows into pieces, the largest first, whose temporaries stay in the cache."""
    cached = _CACHED_ELEMENTS * torch.get_num_threads()
    step = (cached if device.type == "cpu" else _DEVICE_ELEMENTS) // row_elements
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


class BlockCodec(Codec):
    """A codec of records; subclasses say what the scale and the codes of a block are. Their scratch
    is fp32 (2, n, 128) to write to."""

    bits: int
    block_elements = BLOCK
    limit = LIMIT

    @abstractmethod
    def _scales(self, blocks: Tensor, largest: Tensor, count: int, scratch: Tensor) -> Tensor:
        """Scales (n, 1) of blocks (n, 128), as fp32 that bf16 holds exactly, from the largest
        magnitude of each block (n, 1). Zeros fill up the last block to more than `count` values."""

    @abstractmethod
    def _codes(self, blocks: Tensor, scales: Tensor, scratch: Tensor) -> Tensor:
        """Code bytes (n, `code_bytes(128)`), maybe in scratch; of an integer the low eight bits."""

    @abstractmethod
    def _values(self, codes: Tensor, out: Tensor) -> None:
        """Writes what code bytes of n blocks stand for, before scaling, into `out` (n, 128)."""

    @cached_property
    def _record_bytes(self) -> int:
        return SCALE_BYTES + self.code_bytes(BLOCK)

    def code_bytes(self, elements: int) -> int:
        """The size of the codes of at most one block's values."""
        return (elements * self.bits + 7) // 8

    def encoded_bytes(self, elements: int) -> int:
        whole, rest = divmod(elements, BLOCK)
        return whole * self._record_bytes + (SCALE_BYTES + self.code_bytes(rest) if rest else 0)

    def encode(self, values: Tensor) -> Tensor:
        elements = values.numel()
        raw = torch.empty(self.encoded_bytes(elements), dtype=torch.uint8, device=values.device)
        whole = elements // BLOCK
        blocks = values[: whole * BLOCK].view(whole, BLOCK)
        records = raw[: whole * self._record_bytes].view(whole, self._record_bytes)
        cut = list(pieces(whole, BLOCK, values.device))
        scratch = values.new_empty(2, cut[0].stop if cut else 1, BLOCK)
        extremes = [self._encode(blocks[piece], records[piece], BLOCK, scratch) for piece in cut]
        if rest := elements - whole * BLOCK:
            block = values.new_zeros(1, BLOCK)
            block[0, :rest] = values[whole * BLOCK :]
            record = torch.empty(1, self._record_bytes, dtype=torch.uint8, device=values.device)
            extremes.append(self._encode(block, record, rest, scratch))
            tail = raw[whole * self._record_bytes :]
            tail.copy_(record[0, : tail.numel()])
        if extremes:  # looked at once: that waits for the device
            self.check_range(torch.cat(extremes))
        return raw

    def decode(self, raw: Tensor, elements: int) -> Tensor:
        self.check_size(raw, elements)
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

    def _encode(self, blocks: Tensor, records: Tensor, count: int, scratch: Tensor) -> Tensor:
        """Fills the records; returns the least and the largest value, NaN if any is."""
        scratch = scratch[:, : len(blocks)]
        low, high = blocks.amin(1, keepdim=True), blocks.amax(1, keepdim=True)
        scales = self._scales(blocks, torch.maximum(high, -low), count, scratch)
        records[:, :SCALE_BYTES] = scales.to(torch.bfloat16).view(torch.uint8)
        records[:, SCALE_BYTES:] = self._codes(blocks, scales, scratch)
        return torch.stack((low.amin(), high.amax()))

    def _decode(self, records: Tensor, blocks: Tensor) -> None:
        self._values(records[:, SCALE_BYTES:], blocks)
        scales = aligned(records[:, :SCALE_BYTES]).view(torch.bfloat16)
        blocks.mul_(scales.to(torch.float32))


@lru_cache(maxsize=8)
def bits_of_bytes(device: torch.device) -> Tensor:
    """uint8 (256, 8): the bits of each byte, the lowest first."""
    byte = torch.arange(256, dtype=torch.int64, device=device)[:, None]
    return (byte >> torch.arange(8, dtype=torch.int64, device=device) & 1).to(torch.uint8)


@lru_cache(maxsize=8)
def bit_values(device: torch.device) -> Tensor:
    """fp32 (8): what each bit of a byte counts, the lowest first."""
    return 2.0 ** torch.arange(8, dtype=torch.float32, device=device)


def aligned(raw: Tensor) -> Tensor:
    """A copy that can be viewed as wider elements: `raw` may start and step at odd bytes."""
    return raw.clone(memory_format=torch.contiguous_format)


def to_bf16(scales: Tensor) -> Tensor:
    """fp32 rounded to what bf16 holds, to nearest even."""
    return scales.to(torch.bfloat16).to(torch.float32)


_SMALLEST_SCALE = 2.0**-120  # keeps quotients finite, and decoded values normal
_LARGEST = 127.0
_TO_INTEGERS = 1.5 * 2.0**23  # fp32 numbers around it are the integers, in their low bits


class Int8(BlockCodec):
    """Eight-bit integers, symmetric, with a scale for every 128 values: 8.125 bits a value.

    Code q, two's complement, stands for q * scale; q is -127 to 127. The scale is a 127th of the
    block's largest magnitude amax, in bf16: rounded to nearest, which keeps that value at 127. The
    error is at most max(amax / 254 * 1.01, 2^-121).

    Relative RMS error, gaussian / Student-t with 5 / with 3 degrees of freedom: 0.0065 / 0.0096 /
    0.0137; blocks of 64 (8.25 bits): 0.0060 / 0.0082 / 0.0110."""

    name, wire_id, bits = "int8", 4, 8

    def _scales(self, blocks: Tensor, largest: Tensor, count: int, scratch: Tensor) -> Tensor:
        ideal = largest / torch.full_like(largest, _LARGEST)  # by a number it may be a product
        return to_bf16(ideal.clamp_(min=_SMALLEST_SCALE))

    def _codes(self, blocks: Tensor, scales: Tensor, scratch: Tensor) -> Tensor:
        quotients = torch.div(blocks, scales, out=scratch[0])
        return quotients.add_(_TO_INTEGERS).view(torch.int32)

    def _values(self, codes: Tensor, out: Tensor) -> None:
        out.copy_(codes.view(torch.int8))


_TOP = 64.0  # 2^6: the largest of the seven powers over the least
_SMALLEST_E3M0 = 2.0**-119  # keeps the least power normal
_OTHER_RATIOS = (0.828125, 1.15625)  # of the scales tried; few bits, so that products are exact
_TO_SQUARES = 6.0  # fp32 numbers around it are multiples of 2^-21
_ONE = 1 << 23  # one exponent step in the bits of fp32
_HALF = _ONE >> 1
_ZERO = 127 * _ONE  # the bits of 1, which stands for code 0
_EXPONENT = -_ONE  # sign and exponent
_VALUES = tuple(
    sign * (2.0 ** (code - 7) if code else 0.0) for sign in (1.0, -1.0) for code in range(8)
)


class E3M0(BlockCodec):
    """FP4 with a sign, three exponent bits and no mantissa: 4.125 bits a value.

    Code 8 * sign + c stands for 0 if c is 0, otherwise for +-scale * 2^(c - 7). Rounding to nearest
    is in the linear domain (1.5 lies between 1 and 2; half of the least power goes up). The scale
    is the best, by squared error, of the block's largest magnitude amax and two neighbours, which
    shift the powers by about a quarter of an octave either way; the largest value keeps the top
    code in all three. The error is at most max(|x| / 3, amax / 96, 2^-126).

    Ref: arXiv:2501.18512 (Streaming DiLoCo) for the format; scale, block and its choice are ours.
    """

    name, wire_id, bits = "e3m0", 6, 4

    def _scales(self, blocks: Tensor, largest: Tensor, count: int, scratch: Tensor) -> Tensor:
        scales = to_bf16(largest.clamp(min=_SMALLEST_E3M0))
        quotients, spare = scratch.unbind()
        torch.div(blocks, scales, out=quotients)
        least, best = _squared_error(quotients, 1.0, spare), scales
        for ratio in _OTHER_RATIOS:
            error = _squared_error(quotients, ratio, spare)
            best = torch.where(error < least, to_bf16(scales * ratio), best)
            least = torch.minimum(error, least)
        return torch.where(largest < _SMALLEST_E3M0, scales, best)

    def _codes(self, blocks: Tensor, scales: Tensor, scratch: Tensor) -> Tensor:
        # In units of the least power, y -> max(2y, 1 + y) makes the step from 0 to 1 an octave too:
        # [1, 2) is what lies between 0 and 1, [2, 4) between 1 and 2, and so on. Adding half a
        # step to the bits of fp32 then carries into the exponent from the middle on.
        units, octaves = scratch.unbind()
        torch.div(blocks, scales * (1 / _TOP), out=units)
        torch.add(units.abs_(), 1.0, out=octaves)
        codes = torch.maximum(units.add_(units), octaves, out=octaves).view(torch.int32)
        codes.add_(_HALF - _ZERO).bitwise_right_shift_(23)
        signs = units.view(torch.int32)
        torch.bitwise_right_shift(blocks.view(torch.int32), 28, out=signs)
        # Two codes to a byte, the first in the low half: little-endian, it is the low word.
        pairs = codes.bitwise_or_(signs.bitwise_and_(8)).view(torch.int64)
        return pairs.bitwise_or_(torch.bitwise_right_shift(pairs, 28, out=signs.view(torch.int64)))

    def _values(self, codes: Tensor, out: Tensor) -> None:
        index = codes.to(torch.int32).view(-1)
        torch.index_select(_pairs(codes.device), 0, index, out=out.view(torch.float64).view(-1))


def _squared_error(values: Tensor, ratio: float, scratch: Tensor) -> Tensor:
    """The error of rounding fp32 (n, 128), at most 1.5, to `ratio` times powers of two: int32
    (n, 1), in steps of 2^-21, whose sum is the same in any order."""
    # What reaches 1.5 * ratio carries into the exponent.
    powers, carry = scratch.view(torch.int32), round((2 - 1.5 * ratio) * _ONE)
    torch.add(values.view(torch.int32), carry, out=powers).bitwise_and_(_EXPONENT)
    errors = torch.sub(values, scratch, alpha=ratio, out=scratch)  # products are exact: few bits
    steps = errors.mul_(errors).add_(_TO_SQUARES).view(torch.int32)
    return steps.sum(1, keepdim=True, dtype=torch.int32)  # may wrap around, all by the same


@lru_cache(maxsize=8)
def _pairs(device: torch.device) -> Tensor:
    """For each byte its two fp32 values, held as the bits of one float64: moved, never computed."""
    single = torch.tensor(_VALUES, dtype=torch.float32, device=device)
    code = torch.arange(256, dtype=torch.int64, device=device)
    return single[torch.stack((code & 15, code >> 4), 1)].view(torch.float64).view(-1)
