"""Numbers as people read them."""

import math
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_MB = 1e6


def megabytes(count_bytes: float) -> str:
    """`33.1 MB`: millions of bytes, one decimal."""
    return f"{count_bytes / _MB:,.1f} MB"


def size(count_bytes: float) -> str:
    """`33.1 MB`, or `15.2 kB` of what is small."""
    return megabytes(count_bytes) if count_bytes >= 0.1 * _MB else f"{count_bytes / 1e3:.1f} kB"


def duration(seconds: float) -> str:
    """`12 s`, `3 min 20 s`, `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def count(number: int, noun: str) -> str:
    """`1 round`, `1,200 rounds`, `8 microbatches`."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def ratio(number: float) -> str:
    """`50 times`, `1.3 times`."""
    return f"{number:,.0f} times" if number >= 20 else f"{number:.1f} times"


def parameters(number: int) -> str:
    """`812 thousand`, `1.3 million`, `7.0 billion` parameters."""
    for scale, word in ((1e9, "billion"), (1e6, "million")):
        if number >= scale:
            return f"{number / scale:.1f} {word} parameters"
    return f"{round(number / 1e3)} thousand parameters" if number >= 1e4 else f"{number} parameters"


def bits_per_byte(loss_nats: float) -> float:
    return loss_nats / math.log(2)


def perplexity(loss_nats: float) -> float:
    return math.exp(loss_nats) if loss_nats < 700 else math.inf


def optional(value: T | None, show: Callable[[T], str]) -> str:
    """A dash for what is not known."""
    return "-" if value is None else show(value)
