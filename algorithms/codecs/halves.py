"""What the two 16-bit floats have in common: two bytes a value, little-endian, to nearest even."""

import torch
from torch import Tensor

from algorithms.codecs.base import check_range, check_size


class Half:
    """Subclasses say which; nothing but the dtype and what it can hold differs."""

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
