"""Wire codecs: how fp32 values travel. Each name here has one wire id, and each id one codec."""

from algorithms.codecs.base import Codec
from algorithms.codecs.e3m0 import E3M0
from algorithms.codecs.floats import BF16, FP16, FP32
from algorithms.codecs.int4 import Int4
from algorithms.codecs.int8 import Int8
from algorithms.codecs.topk import TopK

__all__ = ["CODECS", "Codec", "codec_by_name"]

CODECS: tuple[Codec, ...] = (FP32(), BF16(), FP16(), Int8(), Int4(), E3M0(), TopK())


def codec_by_name(name: str) -> Codec:
    """Raises ValueError, with the names that exist."""
    for codec in CODECS:
        if codec.name == name:
            return codec
    raise ValueError(f"unknown codec {name!r}; use one of {', '.join(c.name for c in CODECS)}")
