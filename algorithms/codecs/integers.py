"""Rounding quotients to integers, by the layout of fp32 alone: no conversion, no branch."""

import torch
from torch import Tensor

_TO_INTEGERS = 1.5 * 2.0**23  # fp32 numbers around it are the integers


def rounded(quotients: Tensor, bits: int, noise: Tensor | None) -> Tensor:
    """Integers modulo 2^bits in the low bits of an int32 (above them: anything).

    Args:
        quotients: fp32, at most 2^(bits - 1) in magnitude; overwritten.
        noise: int32, uniform in [0, 2^(23 - bits)): rounds stochastically, without bias but for
            the multiple of 2^(bits - 23) that a quotient is rounded to first. None rounds to
            nearest even.
    """
    if noise is None:
        return quotients.add_(_TO_INTEGERS).view(torch.int32)
    # Within [2^bits, 2^(bits + 1)] fp32 is a fixed-point number with 23 - bits fractional bits.
    fraction = 23 - bits
    fixed = quotients.add_(1.5 * 2.0**bits).view(torch.int32)
    fixed.add_(noise).add_(1 << (bits - 1 + fraction))
    return fixed.bitwise_right_shift_(fraction)
