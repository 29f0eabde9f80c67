"""Noise for stochastic rounding that follows from a seed alone, the same on every device.

Counter-based: value i depends on (seed, i) only, through an integer hash in wrapping int32
arithmetic, so neither the device nor the order of the work changes it.

Ref: two rounds of multiply-xorshift; multipliers from C. Wellons, "Prospecting for hash functions"
(2018). The seed enters before the first and the second round, so that two seeds do not give two
stretches of one sequence.
"""

import torch
from torch import Tensor

_WORD = 1 << 32
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B


def fill(noise: Tensor, seed: int, start: int, bits: int, scratch: Tensor) -> None:
    """Fills an int32 tensor with values `start`, `start` + 1, ... of the seed's noise.

    Args:
        start: below 2^32, where the sequence starts anew.
        bits: 1 to 31; the noise is uniform in [0, 2^bits).
        scratch: like `noise`, to write to.
    """
    before, between = _keys(seed)
    torch.arange(noise.numel(), out=noise.view(-1))
    noise.add_(_signed(start)).mul_(_signed(_GOLDEN >> 32)).add_(before)
    _fold(noise, 16, scratch)
    noise.mul_(_signed(_FIRST)).bitwise_xor_(between)
    _fold(noise, 15, scratch)
    noise.mul_(_signed(_SECOND))
    noise.bitwise_right_shift_(32 - bits).bitwise_and_((1 << bits) - 1)


def _fold(words: Tensor, by: int, scratch: Tensor) -> None:
    """words ^= words >> by, shifting zeros in."""
    torch.bitwise_right_shift(words, by, out=scratch)
    words.bitwise_xor_(scratch.bitwise_and_((1 << (32 - by)) - 1))


def _keys(seed: int) -> tuple[int, int]:
    """Two int32 keys of a seed, by the finisher of splitmix64."""
    mixed = (seed * _GOLDEN + _GOLDEN) % (_WORD * _WORD)
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % (_WORD * _WORD)
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % (_WORD * _WORD)
    mixed ^= mixed >> 31
    return _signed(mixed), _signed(mixed >> 32)


def _signed(word: int) -> int:
    """The low 32 bits as a signed number: torch's int32 arithmetic wraps."""
    return (word + _WORD // 2) % _WORD - _WORD // 2
