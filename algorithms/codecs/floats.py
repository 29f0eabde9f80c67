"""The identity, and the two 16-bit floats: little-endian, the latter rounded to nearest even.

fp32   exact, four bytes a value
bf16   fp32's range, eight bits of precision
fp16   IEEE half precision: eleven bits of precision, values below 65520 only
"""

import torch
from torch import Tensor

from algorithms.codecs.base import check_range, check_size


class FP32:
    """Exact; encoding and decoding are views, not copies."""

    name = "fp32"
    wire_id = 1
    block_elements = 1
    rounds = False
    unit_bytes = 4
    limit = torch.finfo(torch.float32).max

    def encoded_bytes(self, elements: int) -> int:
        return 4 * elements

    def encode(self, values: Tensor, seed: int | None = None) -> Tensor:
        check_range(self, values, self.limit)
        return values.view(torch.uint8)

    def decode(self, raw: Tensor, elements: int) -> Tensor:
        check_size(self, raw, elements)
        return raw.view(torch.float32)


class Half:
    """Two bytes a value; subclasses say the dtype and what it can hold."""

    name: str
    wire_id: int
    dtype: torch.dtype
    limit: float
    block_elements = 1
    rounds = False
    unit_bytes = 2

    def encoded_bytes(self, elements: int) -> int:
        return 2 * elements

    def encode(self, values: Tensor, seed: int | None = None) -> Tensor:
        check_range(self, values, self.limit)
        return values.to(self.dtype).view(torch.uint8)

    def decode(self, raw: Tensor, elements: int) -> Tensor:
        check_size(self, raw, elements)
        return raw.view(self.dtype).to(torch.float32)


class BF16(Half):
    """Relative error at most 2^-8."""

    name = "bf16"
    wire_id = 2
    dtype = torch.bfloat16
    limit = 2.0**128 - 2.0**119 - 2.0**104  # the largest fp32 number that does not become infinity


class FP16(Half):
    """Relative error at most 2^-11, absolute at most 2^-25 below 2^-14."""

    name = "fp16"
    wire_id = 3
    dtype = torch.float16
    limit = 65520.0 - 2.0**-8  # the largest fp32 number that does not become infinity
