"""Wire codecs: how fp32 values travel. Each name here has one wire id, and each id one codec.

codec.py   the base of all; fp32, and bf16 in 16 bits
blocks.py  the base of those with a scale for every 128 values; int8; e3m0 of Streaming DiLoCo
signs.py   sign in one bit, ternary five values to a byte: what they leave out must be kept
topk.py    the largest 32 to 256 of every 4096 values
"""

from murmuration.algorithms.codecs.blocks import E3M0, Int8
from murmuration.algorithms.codecs.codec import BF16, FP32, Codec
from murmuration.algorithms.codecs.signs import Sign, Ternary
from murmuration.algorithms.codecs.topk import TopK

__all__ = ["CODECS", "Codec", "bits_per_value", "codec_by_name", "has_few_bits"]

_BITS_SAMPLE = 1 << 20
_FEW_BITS = 4

# Wire ids 3 and 5 were fp16 and int4; no other codec takes them.
CODECS: tuple[Codec, ...] = (
    FP32(),
    BF16(),
    Int8(),
    E3M0(),
    TopK(),
    Sign(),
    Ternary(),
    TopK("topk32", 10, 32),
    TopK("topk128", 11, 128),
    TopK("topk256", 12, 256),
)


def codec_by_name(name: str) -> Codec:
    """Raises ValueError, with the names that exist."""
    for codec in CODECS:
        if codec.name == name:
            return codec
    raise ValueError(f"unknown codec {name!r}; use one of {', '.join(c.name for c in CODECS)}")


def bits_per_value(name: str) -> float:
    """On the wire, scales and the like included. Raises ValueError: there is no such codec."""
    return 8 * codec_by_name(name).encoded_bytes(_BITS_SAMPLE) / _BITS_SAMPLE


def has_few_bits(name: str) -> bool:
    """Says whether a codec has under four bits: it leaves most out, so that something keeps it."""
    return bits_per_value(name) < _FEW_BITS
