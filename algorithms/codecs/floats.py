"""The identity, and the upper half of fp32's bits: little-endian.

fp32   exact, four bytes a value
bf16   fp32's range, eight bits of precision, rounded to nearest even
"""

import torch
from torch import Tensor

from murmuration.algorithms.codecs.base import check_range, check_size


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
