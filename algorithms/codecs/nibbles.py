"""Two 4-bit codes in a byte, the first in the low half."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

_PAIRS = 256


def packed(codes: Tensor, scratch: Tensor) -> Tensor:
    """int32 (n, m) of codes 0 to 15 -> int64 (n, m / 2), a byte each in the low eight bits.

    Both are overwritten; `scratch` is like `codes`.
    """
    pairs = codes.view(torch.int64)  # little-endian: the first code is the low word
    second = torch.bitwise_right_shift(pairs, 28, out=scratch.view(torch.int64))
    return pairs.bitwise_or_(second)


def look_up(codes: Tensor, values: tuple[float, ...], out: Tensor) -> None:
    """Bytes (n, m / 2) -> `out` (n, m): for each code its one of the 16 fp32 `values`."""
    table = _pairs(values, codes.device)
    index = codes.to(torch.int32).view(-1)
    torch.index_select(table, 0, index, out=out.view(torch.float64).view(-1))


@lru_cache(maxsize=32)
def _pairs(values: Sequence[float], device: torch.device) -> Tensor:
    """For each byte its two fp32 values, held as the bits of one float64: moved, never computed."""
    single = torch.tensor(values, dtype=torch.float32, device=device)
    code = torch.arange(_PAIRS, device=device)
    return single[torch.stack((code & 15, code >> 4), 1)].view(torch.float64).view(-1)
