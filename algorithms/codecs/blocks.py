"""The base of the codecs with a scale for every 128 values, and int8.

The encoding is a row of records, one per block of 128 consecutive values:

    scale, bf16, little-endian | 128 codes of `bits` bits, the first in the lowest bits

The last record ends with its last value (the last byte is filled up with zero bits). `ternary`
packs its codes in base 3. All arithmetic is in integers, in single IEEE operations or in sums that
are exact, so every device gives the same bytes and values. Bytes that no encoder wrote may decode
to NaN or infinity: the caller checks (murmuration.worker.wire.check_values does).

Blocks of 128 rather than 64 take an eighth of a bit less for a tenth more error, and zstd takes off
twice as much.
"""

from abc import abstractmethod
from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from murmuration.algorithms.codecs.codec import Codec

BLOCK = 128
SCALE_BYTES = 2
LIMIT = 2.0**127  # above, a rounded scale could overflow
_CACHED_ELEMENTS = 256 * 1024  # 3 MiB of temporaries; with less, the calls cost more than they do
_DEVICE_ELEMENTS = 4 * 1024 * 1024  # accelerators want long kernels


def pieces(rows: int, row_elements: int, device: torch.device) -> Iterator[slice]:
    """Cuts rows into the pieces in which they are worked on: their temporaries stay in the cache.
    The first is the largest."""
    step = (_CACHED_ELEMENTS if device.type == "cpu" else _DEVICE_ELEMENTS) // row_elements
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
        """Code bytes (n, `code_bytes(128)`) of blocks (n, 128), of any type: of an integer the low
        eight bits count. They may lie in the scratch."""

    @abstractmethod
    def _values(self, codes: Tensor, out: Tensor) -> None:
        """Writes what code bytes of n blocks stand for, before scaling, into `out` (n, 128)."""

    @property
    def _record_bytes(self) -> int:
        return SCALE_BYTES + self.code_bytes(BLOCK)

    def code_bytes(self, elements: int) -> int:
        """The size of the codes of at most one block's values."""
        return (elements * self.bits + 7) // 8

    def encoded_bytes(self, elements: int) -> int:
        whole, rest = divmod(elements, BLOCK)
        return whole * self._record_bytes + (rest > 0) * SCALE_BYTES + self.code_bytes(rest)

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
    0.0137; blocks of 64 (8.25 bits): 0.0060 / 0.0082 / 0.0110.
    """

    name, wire_id, bits = "int8", 4, 8

    def _scales(self, blocks: Tensor, largest: Tensor, count: int, scratch: Tensor) -> Tensor:
        ideal = largest / torch.full_like(largest, _LARGEST)  # by a number it may be a product
        return to_bf16(ideal.clamp_(min=_SMALLEST_SCALE))

    def _codes(self, blocks: Tensor, scales: Tensor, scratch: Tensor) -> Tensor:
        quotients = torch.div(blocks, scales, out=scratch[0])
        return quotients.add_(_TO_INTEGERS).view(torch.int32)

    def _values(self, codes: Tensor, out: Tensor) -> None:
        out.copy_(codes.view(torch.int8))
