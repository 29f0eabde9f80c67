"""Numbers as people read them, one format for each kind; text from elsewhere, fit to be shown.

Three significant digits, thousands with commas, a space before the unit. Columns whose rows are
compared keep one unit (`megabytes`) or a fixed number of decimals (`percent`).
"""

import math
from collections.abc import Callable, Mapping
from typing import TypeVar

T = TypeVar("T")
_MOST_DECIMALS = 6
_MOST_NATS = 100.0  # whose perplexity is still written out
_MAX_NAME = 40  # characters
MAX_SHOWN, MAX_REASON = 80, 200  # likewise, of text from elsewhere


def megabytes(count_bytes: float) -> str:
    """`33.1 MB`, `0.046 MB`: always millions of bytes, for figures that stand below each other."""
    millions = count_bytes / 1e6
    if 0 < millions < 0.1:  # of a tiny model
        return f"{float(f'{millions:.2g}'):f}".rstrip("0") + " MB"
    return f"{millions:,.1f} MB"


def size(count_bytes: float) -> str:
    """`1.2 GB`, `33.1 MB`, `15.2 kB`, `512 B`."""
    for scale, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count_bytes >= scale:
            return f"{count_bytes / scale:,.1f} {unit}"
    return f"{count_bytes:.0f} B"


def seconds(time_s: float) -> str:
    """Writes a measured time: `0 ms`, `12.3 ms`, `4.56 s`, `1,234 s`."""
    if time_s < 1e-4:
        return "0 ms"
    if time_s < 1:
        return f"{time_s * 1e3:.3g} ms"
    return f"{time_s:.3g} s" if time_s < 100 else f"{time_s:,.0f} s"


def duration(time_s: float) -> str:
    """Writes a time of waiting: `12 s`, `3 min 20 s`, `2 h 05 min`."""
    whole = round(time_s)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def percent(share: float, decimals: int | None = None) -> str:
    """`94.9 %` of a share of 0.949. Args: decimals: by default three digits, as few as it takes."""
    form = ".3g" if decimals is None else f",.{decimals}f"
    return f"{100 * share:{form}} %"


def listed(values: object) -> str:
    """`, accuracy 0.9123, recall 0.8`: what a task measures, behind a figure; mostly nothing."""
    found = values if isinstance(values, Mapping) else {}
    numbers = {name: value for name, value in found.items() if isinstance(value, int | float)}
    return "".join(f", {shown(str(name), _MAX_NAME)} {v:.4g}" for name, v in numbers.items())


def rate(mbps: float) -> str:
    """`1.5 Gbit/s`, `20 Mbit/s`, `128 kbit/s`. Args: mbps: millions of bits per second."""
    for scale, unit in ((1e3, "Gbit/s"), (1.0, "Mbit/s")):
        if mbps >= scale:
            return f"{mbps / scale:.3g} {unit}"
    return f"{mbps * 1e3:.3g} kbit/s"


def count(number: int, noun: str) -> str:
    """`1 round`, `1,200 rounds`, `8 microbatches`."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def ratio(number: float) -> str:
    """`50 times`, `1.3 times`, `0.26 times`."""
    if number < 1:
        return f"{number:.2g} times"
    return f"{number:,.0f} times" if number >= 20 else f"{number:.1f} times"


def parameters(number: int) -> str:
    """`812 thousand`, `1.3 million`, `7.0 billion` parameters."""
    for scale, word in ((1e9, "billion"), (1e6, "million")):
        if number >= scale:
            return f"{number / scale:.1f} {word} parameters"
    return f"{round(number / 1e3)} thousand parameters" if number >= 1e4 else f"{number} parameters"


def measured(value: float, error: float | None) -> str:
    """`1.258 ± 0.047`: with two digits of the standard error, and no more of the value."""
    if not error or not math.isfinite(error):
        return f"{value:.3f}"
    decimals = min(_MOST_DECIMALS, max(0, 1 - math.floor(math.log10(abs(error)))))
    return f"{value:.{decimals}f} ± {error:.{decimals}f}"


def perplexity(loss_nats: float) -> str:
    if loss_nats > _MOST_NATS:
        return f"above {math.exp(_MOST_NATS):.0e}"
    return f"{math.exp(loss_nats):.2f}"


def optional(value: T | None, show: Callable[[T], str]) -> str:
    return "-" if value is None else show(value)


def shown(text: str, most: int = MAX_SHOWN) -> str:
    """Cuts text to `most` characters; what a terminal could take for a command becomes `?`."""
    cut = text if len(text) <= most else f"{text[: most - 3]}..."
    return cut if cut.isprintable() else "".join(c if c.isprintable() else "?" for c in cut)


def is_utf8(text: str) -> bool:
    """Tells whether others can read it: a path of another encoding, as Python has it, is not."""
    return text == text.encode(errors="replace").decode()
