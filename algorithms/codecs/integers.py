"""Integers with a scale for every 128 values: eight bits, and four."""

import torch
from torch import Tensor

from algorithms.codecs.blocks import BlockCodec, look_up, packed, rounded, to_bf16

_SMALLEST_SCALE = 2.0**-120  # keeps quotients finite, and decoded values normal
_LARGEST = 127.0
_FAR, _NEAR = 8.0, 7.0
_VALUES = tuple(float(code if code <= _FAR else code - 16) for code in range(16))


class Int8(BlockCodec):
    """Eight-bit integers, symmetric, with a scale for every 128 values: 8.125 bits a value.

    Code q, two's complement, stands for q * scale; q is -127 to 127. The scale is a 127th of the
    block's largest magnitude, in bf16: rounded to nearest, which keeps that value at 127, or up for
    stochastic rounding, which may not clip.

    Relative RMS error, gaussian / Student-t with 5 / with 3 degrees of freedom: 0.0065 / 0.0096 /
    0.0137; blocks of 64 (8.25 bits): 0.0060 / 0.0082 / 0.0110.

    Error at most max(amax / 254 * 1.01, 2^-121) for amax the largest magnitude of the block;
    twice that (and below 1.02 * amax / 127) with stochastic rounding.
    """

    name = "int8"
    wire_id = 4
    bits = 8
    noise_bits = 15

    def _scales(
        self,
        blocks: Tensor,
        low: Tensor,
        high: Tensor,
        count: int,
        exact: bool,
        scratch: Tensor,
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


class Int4(BlockCodec):
    """Four-bit integers with a signed scale for every 128 values: 4.125 bits a value.

    Code q, modulo 16, stands for q * scale; q is -7 to 8, so one side reaches further. The sign of
    the scale turns that side to where the block's largest magnitude is: the scale's magnitude is
    the larger of (largest / 8) and (largest on the other side / 7). There is no zero point and
    nothing is clipped. The scale is bf16: rounded to nearest, which keeps the extremes at 8 and 7,
    or up for stochastic rounding, which may not clip.

    Relative RMS error, gaussian / Student-t with 5 / with 3 degrees of freedom: 0.106 / 0.153 /
    0.200; on pseudo-gradients of the built-in task 0.102. In blocks of 64 (4.25 bits) 0.097 / 0.130
    / 0.163. Others at 4.25 bits: -7 to 7 with a bf16 scale 0.108 / 0.147 / 0.183, with an eight-bit
    scale of three mantissa bits for every 32 values 0.104 / 0.131 / 0.154 (which spans too few
    octaves), with a power of two for every 32 values 0.144 / 0.182 / 0.207.

    Error at most max(amax / 14 * 1.01, 2^-121) for amax the largest magnitude of the block.

    Between amax / 16 and amax / 14, by how even the two sides are. Twice that with stochastic
    rounding.
    """

    name = "int4"
    wire_id = 5
    bits = 4
    noise_bits = 19

    def _scales(
        self,
        blocks: Tensor,
        low: Tensor,
        high: Tensor,
        count: int,
        exact: bool,
        scratch: Tensor,
    ) -> Tensor:
        below, above = (-low).clamp_(min=0.0), high.clamp(min=0.0)
        far, near = torch.maximum(below, above), torch.minimum(below, above)
        ideal = torch.maximum(far * (1 / _FAR), near / torch.full_like(near, _NEAR))
        scales = to_bf16(ideal.clamp_(min=_SMALLEST_SCALE), up=exact)
        # Turned only if the negative side needs the 8: what was decoded then encodes to the same.
        turned = below / scales > _NEAR if exact else below / scales >= (_NEAR + _FAR) / 2
        return torch.where(turned, -scales, scales)

    def _codes(
        self, blocks: Tensor, scales: Tensor, noise: Tensor | None, scratch: Tensor
    ) -> Tensor:
        codes = rounded(torch.div(blocks, scales, out=scratch[0]), 4, noise)
        return packed(codes.bitwise_and_(15), scratch[1])

    def _values(self, codes: Tensor, out: Tensor) -> None:
        look_up(codes, _VALUES, out)
