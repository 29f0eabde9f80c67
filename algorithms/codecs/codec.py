"""The interface of a wire codec, and the codecs that keep each value by itself, little-endian.

fp32   exact, four bytes a value
bf16   fp32's range, eight bits of precision, rounded to nearest even
"""

from typing import Protocol

import torch
from torch import Tensor


class Codec(Protocol):
    """Turns fp32 values into bytes and back, block by block.

    Values are encoded in blocks of `block_elements`: the encoding of a range that starts at a
    multiple of it is that range of the whole's encoding, so shards and frames can be coded apart.
    Zeros stay zeros; in `sign`, which has no code for zero, only whole blocks of them. Works on any
    device, and gives the same bytes and values on each.
    """

    @property
    def name(self) -> str: ...

    @property
    def wire_id(self) -> int: ...

    @property
    def block_elements(self) -> int: ...

    @property
    def unit_bytes(self) -> int:
        """Size of the units whose bytes at one place are alike, such as exponents: a compressor
        finds more when they lie together. 1 where there is no such pattern."""
        ...

    def encoded_bytes(self, elements: int) -> int:
        """Size of the encoding of `elements` values."""
        ...

    def encode(self, values: Tensor) -> Tensor:
        """1-D contiguous fp32 -> 1-D uint8 of `encoded_bytes`; may share memory with `values`.

        Args:
            values: finite; never written to.

        Raises:
            ValueError: values are NaN, infinite, or too large to be represented.
        """
        ...

    def decode(self, raw: Tensor, elements: int) -> Tensor:
        """1-D uint8 -> 1-D fp32 of `elements`; may share memory with `raw`.

        Raises:
            ValueError: the number of bytes does not fit `elements`, or no encoder writes such ones.
        """
        ...


def check_size(codec: Codec, raw: Tensor, elements: int) -> None:
    """Raises ValueError unless `raw` is the encoding of `elements` values, by size."""
    expected = codec.encoded_bytes(elements)
    if raw.numel() != expected:
        raise ValueError(
            f"{codec.name}: {elements} values take {expected} bytes, got {raw.numel()}"
        )


def check_range(codec: Codec, values: Tensor, limit: float) -> None:
    """Raises ValueError when any of `values` (1-D) is NaN or beyond +-`limit`."""
    if values.numel() > 0:
        low, high = torch.aminmax(values)  # both NaN if any is
        check_extremes(codec, low.item(), high.item(), limit)


def check_extremes(codec: Codec, low: float, high: float, limit: float) -> None:
    """Raises ValueError when the least or the largest of some values is NaN or beyond `limit`."""
    if not (-limit <= low and high <= limit):
        raise ValueError(
            f"{codec.name}: the values are NaN, infinite or too large (at most {limit:.6g})"
        )


class FP32:
    """Exact; encoding and decoding are views, not copies."""

    name = "fp32"
    wire_id = 1
    block_elements = 1
    unit_bytes = 4

    def encoded_bytes(self, elements: int) -> int:
        return 4 * elements

    def encode(self, values: Tensor) -> Tensor:
        check_range(self, values, torch.finfo(torch.float32).max)
        return values.view(torch.uint8)

    def decode(self, raw: Tensor, elements: int) -> Tensor:
        check_size(self, raw, elements)
        return raw.view(torch.float32)


class BF16:
    """Two bytes a value, with a relative error of at most 2^-8."""

    name = "bf16"
    wire_id = 2
    block_elements = 1
    unit_bytes = 2
    limit = 2.0**128 - 2.0**119 - 2.0**104  # the largest fp32 number that does not become infinity

    def encoded_bytes(self, elements: int) -> int:
        return 2 * elements

    def encode(self, values: Tensor) -> Tensor:
        check_range(self, values, self.limit)
        return values.to(torch.bfloat16).view(torch.uint8)

    def decode(self, raw: Tensor, elements: int) -> Tensor:
        check_size(self, raw, elements)
        return raw.view(torch.bfloat16).to(torch.float32)
