"""bfloat16: fp32's range, eight bits of precision, two bytes a value; rounds to nearest even."""

import torch
from torch import Tensor

from algorithms.codecs.base import check_range, check_size

_LIMIT = 2.0**128 - 2.0**119 - 2.0**104  # the largest fp32 number that does not round to infinity


class BF16:
    """Relative error at most 2^-8."""

    name = "bf16"
    wire_id = 2
    block_elements = 1
    rounds = False
    unit_bytes = 2
    limit = _LIMIT

    def encoded_bytes(self, elements: int) -> int:
        return 2 * elements

    def encode(self, values: Tensor, seed: int | None = None) -> Tensor:
        check_range(self, values, self.limit)
        return values.to(torch.bfloat16).view(torch.uint8)

    def decode(self, raw: Tensor, elements: int) -> Tensor:
        check_size(self, raw, elements)
        return raw.view(torch.bfloat16).to(torch.float32)
