"""IEEE half precision: eleven bits, two bytes a value, little-endian; rounds to nearest even."""

import torch
from torch import Tensor

from algorithms.codecs.base import check_range, check_size

_LIMIT = 65520.0 - 2.0**-8  # the largest fp32 number that does not round to infinity


class FP16:
    """Relative error at most 2^-11, absolute at most 2^-25 below 2^-14; values below 65520 only."""

    name = "fp16"
    wire_id = 3
    block_elements = 1
    rounds = False
    unit_bytes = 2
    limit = _LIMIT

    def encoded_bytes(self, elements: int) -> int:
        return 2 * elements

    def encode(self, values: Tensor, seed: int | None = None) -> Tensor:
        check_range(self, values, self.limit)
        return values.to(torch.float16).view(torch.uint8)

    def decode(self, raw: Tensor, elements: int) -> Tensor:
        check_size(self, raw, elements)
        return raw.view(torch.float16).to(torch.float32)
