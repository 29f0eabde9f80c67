"""The identity: four bytes a value, little-endian."""

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
