"""One bit a value, and a base-3 digit a value; each with a scale for every 128 values.

Both need the replica to keep what they leave out: `merge = "keep"`. Magnitudes are summed in fixed
point, in steps of 2^-16 of the power of two below the block's largest. A sum of 128 of them fits in
fp32's 24 bits, so its order does not matter.

Relative RMS error, gaussian / Student-t with 5 / with 3 degrees of freedom: sign 0.60 / 0.68 /
0.76, ternary 0.43 / 0.52 / 0.63.

Ref: arXiv:1802.04434 (signSGD) and arXiv:1901.09847 (scaled signs, what they leave out kept) for
`sign`; arXiv:1605.04711 (ternary weight networks) for the threshold of `ternary`, theirs 0.7.
"""

from functools import lru_cache

import torch
from torch import Tensor

from murmuration.algorithms.codecs import blocks as blocked
from murmuration.algorithms.codecs.blocks import BLOCK, BlockCodec

_LEAST_NORMAL = 2.0**-126
_POWER = 0x7F800000  # the exponent in the bits of fp32
_TO_STEPS = 192.0  # fp32 numbers around it are multiples of 2^-16
_THRESHOLD = 0.75  # of the mean magnitude; few bits, so that products are exact
_HALF_OF_ALL = 127.5  # of a byte of ones
_DIGITS = 5  # of base 3 in a byte: 3^5 is 243


class Sign(BlockCodec):
    """The sign times the mean magnitude of the block: 1.125 bits a value with its scale.

    Bit 1 stands for -scale, 0 for +scale. There is no code for zero: among other values a zero
    becomes +-scale by its sign bit. A block of zeros stays one. Error at most (1 + 2^-7) * amax,
    amax the largest magnitude of the block."""

    name, wire_id, bits = "sign", 8, 1

    def _scales(self, blocks: Tensor, largest: Tensor, count: int, scratch: Tensor) -> Tensor:
        unit = _power_below(largest)
        steps = _in_steps(blocks, unit, scratch[0])
        return _scale(steps, torch.full_like(unit, count), unit)

    def _codes(self, blocks: Tensor, scales: Tensor, scratch: Tensor) -> Tensor:
        signs = torch.copysign(torch.full_like(scales, 0.5), blocks, out=scratch[0])
        # A bit b is (1 - sign) / 2. Sums are small integers and halves: exact in any order.
        codes = torch.mv(signs.view(-1, 8), blocked.bit_values(blocks.device)).neg_()
        return codes.add_(_HALF_OF_ALL).view(len(blocks), -1)

    def _values(self, codes: Tensor, out: Tensor) -> None:
        index = codes.to(torch.int32).view(-1)
        torch.index_select(_signs(codes.device), 0, index, out=out.view(-1, 8))


class Ternary(BlockCodec):
    """-scale, 0 or +scale: five values to a byte, 1.75 bits a value with the scale.

    The scale is the mean of the magnitudes above 3/4 of the block's mean magnitude, and a value
    goes to the nearest of the three. Digit 0 stands for 0, 1 for +scale, 2 for -scale; the first
    of five is the least of its byte. A block's 26th byte holds three. Error at most
    max(scale * (1/2 + 2^-9), amax - scale * (1 - 2^-9))."""

    name, wire_id = "ternary", 9

    def code_bytes(self, elements: int) -> int:
        return -(-elements // _DIGITS)

    def _scales(self, blocks: Tensor, largest: Tensor, count: int, scratch: Tensor) -> Tensor:
        unit = _power_below(largest)
        steps, above = _in_steps(blocks, unit, scratch[0]), scratch[1]
        mean = steps.sum(1, keepdim=True).div_(torch.full_like(unit, count))
        torch.gt(steps, mean.mul_(_THRESHOLD), out=above)  # as 0.0 and 1.0
        many = above.sum(1, keepdim=True).clamp_(min=1.0)
        return _scale(steps.mul_(above), many, unit)

    def _codes(self, blocks: Tensor, scales: Tensor, scratch: Tensor) -> Tensor:
        least = torch.where(scales == 0, torch.inf, scales * 0.5)
        whole = BLOCK + -BLOCK % _DIGITS
        digits = blocks.new_empty(len(blocks), whole)
        digits[:, BLOCK:] = 0.0
        above, below = digits[:, :BLOCK], scratch[0]
        torch.gt(blocks, least, out=above)
        above.add_(torch.lt(blocks, -least, out=below), alpha=2)
        codes = torch.mv(digits.view(-1, _DIGITS), _powers(blocks.device))
        return codes.view(len(blocks), -1)

    def _values(self, codes: Tensor, out: Tensor) -> None:
        index = codes.to(torch.int32).view(-1)
        values = torch.index_select(_digits(codes.device), 0, index)
        out.copy_(values.view(len(codes), -1)[:, :BLOCK])


def _power_below(largest: Tensor) -> Tensor:
    """The power of two at or below the largest magnitude of each block (n, 1)."""
    return (largest.view(torch.int32) & _POWER).view(torch.float32).clamp_(min=_LEAST_NORMAL)


def _in_steps(blocks: Tensor, unit: Tensor, out: Tensor) -> Tensor:
    """Magnitudes (n, 128) over `unit` (n, 1), at most 2, as multiples of 2^-16; into `out`."""
    return torch.abs(blocks, out=out).div_(unit).add_(_TO_STEPS).sub_(_TO_STEPS)


def _scale(steps: Tensor, count: Tensor, unit: Tensor) -> Tensor:
    """Their mean, of exact sums, in units (n, 1), as a scale: bf16, and 0 rather than subnormal."""
    scales = blocked.to_bf16(steps.sum(1, keepdim=True).div_(count).mul_(unit))
    return torch.where(scales < _LEAST_NORMAL, 0.0, scales)


@lru_cache(maxsize=8)
def _powers(device: torch.device) -> Tensor:
    return (3 ** torch.arange(_DIGITS, dtype=torch.int64, device=device)).to(torch.float32)


@lru_cache(maxsize=8)
def _signs(device: torch.device) -> Tensor:
    """fp32 (256, 8): what the bits of each byte stand for."""
    return 1.0 - 2.0 * blocked.bits_of_bytes(device).to(torch.float32)


@lru_cache(maxsize=8)
def _digits(device: torch.device) -> Tensor:
    """fp32 (256, 5): what the digits of each byte stand for; those that never occur go on."""
    places = 3 ** torch.arange(_DIGITS, dtype=torch.int64, device=device)
    digits = torch.arange(256, dtype=torch.int64, device=device)[:, None] // places % 3
    return torch.tensor([0.0, 1.0, -1.0], dtype=torch.float32, device=device)[digits]
