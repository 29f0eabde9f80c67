"""The base of all wire codecs, and those that keep each value by itself."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class Codec(ABC):
    """Turns fp32 values into bytes and back, block by block.

    Values are encoded in blocks of `block_elements`: the encoding of a range that starts at a
    multiple of it is that range of the whole's encoding, so shards and frames can be coded apart.
    Zeros stay zeros; in `sign`, which has no code for zero, only whole blocks of them. Works on any
    device, and gives the same bytes and values on each. Attributes: unit_bytes: the size of units
    whose bytes at one place are alike, such as exponents: a compressor finds more when they lie
    together. 1 where there is no such pattern; limit: the largest magnitude that can be encoded."""

    name: str
    wire_id: int
    block_elements = 1
    unit_bytes = 1
    limit = torch.finfo(torch.float32).max

    @abstractmethod
    def encoded_bytes(self, elements: int) -> int:
        """The size of the encoding of `elements` values."""

    @abstractmethod
    def encode(self, values: Tensor) -> Tensor:
        """1-D contiguous fp32 -> 1-D uint8 of `encoded_bytes`; may share memory with `values`,
        which are never written to. Raises ValueError: they are NaN, infinite or above the limit."""

    @abstractmethod
    def decode(self, raw: Tensor, elements: int) -> Tensor:
        """1-D uint8 -> 1-D fp32 of `elements`; may share memory with `raw`. Raises ValueError: the
        number of bytes does not fit `elements`, or no encoder writes such ones."""

    def check_size(self, raw: Tensor, elements: int) -> None:
        """Raises ValueError unless `raw` is the encoding of `elements` values, by size."""
        expected, got = self.encoded_bytes(elements), raw.numel()
        if got != expected:
            raise ValueError(f"{self.name}: {elements} values take {expected} bytes, got {got}")

    def check_range(self, extremes: Tensor) -> None:
        """Raises ValueError where the extremes of some values (1-D) are NaN or beyond the limit."""
        if extremes.numel() > 0:
            low, high = (each.item() for each in torch.aminmax(extremes))  # both NaN if any is
            if not (-self.limit <= low and high <= self.limit):
                raise ValueError(
                    f"{self.name}: the values are NaN, infinite or too large "
                    f"(at most {self.limit:.6g})"
                )


class FP32(Codec):
    """Exact, little-endian; encoding and decoding are views, not copies."""

    name, wire_id, unit_bytes = "fp32", 1, 4
    kind = torch.float32

    def encoded_bytes(self, elements: int) -> int:
        return self.unit_bytes * elements

    def encode(self, values: Tensor) -> Tensor:
        self.check_range(values)
        return values.to(self.kind).view(torch.uint8)

    def decode(self, raw: Tensor, elements: int) -> Tensor:
        self.check_size(raw, elements)
        return raw.view(self.kind).to(torch.float32)


class BF16(FP32):
    """fp32's range in two bytes, rounded to nearest even: a relative error of at most 2^-8."""

    name, wire_id, unit_bytes = "bf16", 2, 2
    kind = torch.bfloat16
    limit = 2.0**128 - 2.0**119 - 2.0**104  # the largest fp32 number that does not become infinity
