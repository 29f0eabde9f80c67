"""Eight-bit integers, symmetric, with a scale for every 128 values: 8.125 bits a value.

Code q, two's complement, stands for q * scale; q is -127 to 127. The scale is a 127th of the
block's largest magnitude, in bf16: rounded to nearest, which keeps that value at 127, or up for
stochastic rounding, which may not clip.

Relative RMS error, gaussian / Student-t with 5 / with 3 degrees of freedom: 0.0065 / 0.0096 /
0.0137; blocks of 64 (8.25 bits): 0.0060 / 0.0082 / 0.0110.
"""

import torch
from torch import Tensor

from algorithms.codecs.blocks import BlockCodec, rounded, to_bf16

_LARGEST = 127.0
_SMALLEST_SCALE = 2.0**-120  # keeps quotients finite, and decoded values normal


class Int8(BlockCodec):
    """Error at most max(amax / 254 * 1.01, 2^-121) for amax the largest magnitude of the block.

    Twice that (and below 1.02 * amax / 127) with stochastic rounding.
    """

    name = "int8"
    wire_id = 4
    bits = 8
    noise_bits = 15

    def _scales(
        self, blocks: Tensor, low: Tensor, high: Tensor, exact: bool, scratch: Tensor
    ) -> Tensor:
        largest = torch.maximum(high, -low)
        ideal = largest / torch.full_like(largest, _LARGEST)  # by a number it may be a product
        return to_bf16(ideal.clamp_(min=_SMALLEST_SCALE), up=exact)

    def _codes(
        self, blocks: Tensor, scales: Tensor, noise: Tensor | None, scratch: Tensor
    ) -> Tensor:
        return rounded(torch.div(blocks, scales, out=scratch[0]), 8, noise)

    def _values(self, codes: Tensor, out: Tensor) -> None:
        out.copy_(codes.view(torch.int8))
