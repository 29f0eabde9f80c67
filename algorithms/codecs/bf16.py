"""bfloat16: fp32's range, eight bits of precision."""

import torch
from torch import Tensor

from algorithms.codecs.base import check_range
from algorithms.codecs.blocks import pieces
from algorithms.codecs.halves import Half
from algorithms.codecs.noise import fill

_DROPPED_BITS = 16  # of fp32's
_LARGEST = 0x7F7F0000  # finite, as the bits of an fp32


class BF16(Half):
    """Relative error at most 2^-8; rounded stochastically at most 2^-7, and none in the mean."""

    name = "bf16"
    wire_id = 2
    dtype = torch.bfloat16
    limit = 2.0**128 - 2.0**119 - 2.0**104  # the largest fp32 number that does not become infinity
    rounds = True

    def encode(self, values: Tensor, seed: int | None = None) -> Tensor:
        if seed is None:
            return super().encode(values)
        check_range(self, values, self.limit)
        rounded = torch.empty(values.numel(), dtype=torch.int32, device=values.device)
        for piece in pieces(values.numel(), 1, values.device):
            self._round(values[piece].view(torch.int32), rounded[piece], seed, piece.start)
        return rounded.view(torch.float32).to(torch.bfloat16).view(torch.uint8)

    @staticmethod
    def _round(bits: Tensor, out: Tensor, seed: int, start: int) -> None:
        """The magnitude goes up when what is dropped of it, and noise, carry over."""
        fill(out, seed, start, _DROPPED_BITS, torch.empty_like(out))
        out.add_(bits & 0x7FFFFFFF).bitwise_and_(-1 << _DROPPED_BITS).clamp_(max=_LARGEST)
        out.bitwise_or_(bits & -0x80000000)
