"""FP4 with a sign, three exponent bits and no mantissa, a scale for every 128 values: 4.125 bits.

Code 8 * sign + c stands for 0 if c is 0, otherwise for +-scale * 2^(c - 7). The scale is bf16.

Rounding to nearest is in the linear domain (1.5 lies between 1 and 2; half of the least power goes
up), and the scale is the best, by squared error, of the block's largest magnitude and two
neighbours, which shift the powers by about a quarter of an octave either way; the largest value
keeps the top code in all three.

Relative RMS error, gaussian / Student-t with 5 / with 3 degrees of freedom: 0.181 / 0.174 / 0.159;
in blocks of 64 (4.25 bits) 0.175 / 0.166 / 0.150, and there 0.188 / 0.177 / 0.157 by the largest
magnitude alone; a power of two as scale gives 0.194 / 0.196 / 0.196, however small the blocks.

Ref: arXiv:2501.18512 (Streaming DiLoCo) for the format; scale, block and its choice are ours.
"""

from functools import lru_cache

import torch
from torch import Tensor

from murmuration.algorithms.codecs.blocks import BlockCodec, to_bf16

_TOP = 64.0  # 2^6: the largest of the seven powers over the least
_SMALLEST_SCALE = 2.0**-119  # keeps the least power normal
_OTHER_RATIOS = (0.828125, 1.15625)  # of the scales tried; few bits, so that products are exact
_TO_STEPS = 6.0  # fp32 numbers around it are multiples of 2^-21
_ONE = 1 << 23  # one exponent step in the bits of fp32
_HALF = _ONE >> 1
_ZERO = 127 * _ONE  # the bits of 1, which stands for code 0
_EXPONENT = -_ONE  # sign and exponent
_VALUES = tuple(
    sign * (2.0 ** (code - 7) if code else 0.0) for sign in (1.0, -1.0) for code in range(8)
)


class E3M0(BlockCodec):
    """Error at most max(|x| / 3, amax / 96, 2^-126), amax the largest magnitude of the block."""

    name, wire_id, bits = "e3m0", 6, 4

    def _scales(self, blocks: Tensor, largest: Tensor, count: int, scratch: Tensor) -> Tensor:
        scales = to_bf16(largest.clamp(min=_SMALLEST_SCALE))
        quotients, spare = scratch.unbind()
        torch.div(blocks, scales, out=quotients)
        least, best = _squared_error(quotients, 1.0, spare), scales
        for ratio in _OTHER_RATIOS:
            error = _squared_error(quotients, ratio, spare)
            best = torch.where(error < least, to_bf16(scales * ratio), best)
            least = torch.minimum(error, least)
        return torch.where(largest < _SMALLEST_SCALE, scales, best)

    def _codes(self, blocks: Tensor, scales: Tensor, scratch: Tensor) -> Tensor:
        # In units of the least power, y -> max(2y, 1 + y) makes the step from 0 to 1 an octave too:
        # [1, 2) is what lies between 0 and 1, [2, 4) between 1 and 2, and so on. Adding half a
        # step to the bits of fp32 then carries into the exponent from the middle on.
        units, octaves = scratch.unbind()
        torch.div(blocks, scales * (1 / _TOP), out=units)
        torch.add(units.abs_(), 1.0, out=octaves)
        codes = torch.maximum(units.add_(units), octaves, out=octaves).view(torch.int32)
        codes.add_(_HALF - _ZERO).bitwise_right_shift_(23)
        signs = units.view(torch.int32)
        torch.bitwise_right_shift(blocks.view(torch.int32), 28, out=signs)
        # Two codes to a byte, the first in the low half: little-endian, it is the low word.
        pairs = codes.bitwise_or_(signs.bitwise_and_(8)).view(torch.int64)
        return pairs.bitwise_or_(torch.bitwise_right_shift(pairs, 28, out=signs.view(torch.int64)))

    def _values(self, codes: Tensor, out: Tensor) -> None:
        index = codes.to(torch.int32).view(-1)
        torch.index_select(_pairs(codes.device), 0, index, out=out.view(torch.float64).view(-1))


def _squared_error(values: Tensor, ratio: float, scratch: Tensor) -> Tensor:
    """Of rounding fp32 (n, 128), at most 1.5, to `ratio` times powers of two: int32 (n, 1), in
    steps of 2^-21, whose sum is the same in any order."""
    # What reaches 1.5 * ratio carries into the exponent.
    powers = torch.add(
        values.view(torch.int32), round((2 - 1.5 * ratio) * _ONE), out=scratch.view(torch.int32)
    )
    powers.bitwise_and_(_EXPONENT)
    errors = torch.sub(values, scratch, alpha=ratio, out=scratch)  # products are exact: few bits
    steps = errors.mul_(errors).add_(_TO_STEPS).view(torch.int32)
    return steps.sum(1, keepdim=True, dtype=torch.int32)  # may wrap around, all by the same


@lru_cache(maxsize=8)
def _pairs(device: torch.device) -> Tensor:
    """For each byte its two fp32 values, held as the bits of one float64: moved, never computed."""
    single = torch.tensor(_VALUES, dtype=torch.float32, device=device)
    code = torch.arange(256, dtype=torch.int64, device=device)
    return single[torch.stack((code & 15, code >> 4), 1)].view(torch.float64).view(-1)
