"""A link between a worker and the rest: how fast, how far, how shaky. `20mbit,delay=50ms`."""

import math
import re
from dataclasses import dataclass

_UNITS_MBPS = {"kbit": 1e-3, "mbit": 1.0, "gbit": 1e3}
_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)")
_EXAMPLE = "write it like 20mbit,delay=50ms,jitter=5ms,loss=0.1"


@dataclass(frozen=True, kw_only=True)
class Link:
    """The link that joins one worker to the others, the same in both directions. Raises ValueError:
    a value out of range, with the fix."""

    rate_mbps: float  # megabits per second up, and as many down
    delay_s: float = 0.0  # added to every byte on its way, in seconds; one way
    jitter_s: float = 0.0  # the delay varies by up to this much either way, in order
    loss: float = 0.0  # connections that break per minute, on average

    def __post_init__(self) -> None:
        if not self.rate_mbps > 0:
            raise ValueError(f"a link of {self.rate_mbps:g} Mbit/s; it must be above 0")
        if not self.delay_s >= 0:
            raise ValueError(f"a link's delay of {self.delay_s:g} s must be at least 0")
        if not 0 <= self.loss < math.inf:
            raise ValueError(
                f"a link's loss is broken connections a minute, at least 0; {self.loss:g} is not"
            )
        if not 0 <= self.jitter_s <= self.delay_s:
            raise ValueError(
                f"a link's jitter of {self.jitter_s:g} s must be between 0 and its delay, "
                f"{self.delay_s:g} s"
            )

    def __str__(self) -> str:
        parts = [f"{self.rate_mbps:g}mbit"]
        for name, value in (("delay", self.delay_s), ("jitter", self.jitter_s)):
            parts += [f"{name}={value * 1e3:g}ms"] if value else []
        parts += [f"loss={self.loss:g}"] if self.loss else []
        return ",".join(parts)


def parse_link(text: str) -> Link:
    """Reads `RATE[,delay=TIME][,jitter=TIME][,loss=PER_MINUTE]`; rates in kbit, mbit, gbit. Raises
    ValueError: what is wrong, and an example."""
    rate, *options = "".join(text.split()).lower().split(",")
    fields = {"delay": "delay_s", "jitter": "jitter_s", "loss": "loss"}
    values: dict[str, float] = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not equals or (field := fields.pop(name, None)) is None:
            raise ValueError(f"link {text!r}: {option!r} is not understood; {_EXAMPLE}")
        values[field] = _number(text, value) if name == "loss" else _of(text, value, _UNITS_S)
    return Link(rate_mbps=_of(text, rate, _UNITS_MBPS), **values)


def _of(text: str, quantity: str, units: dict[str, float]) -> float:
    found = _QUANTITY.fullmatch(quantity)
    if found is None or found.group(2) not in units:
        raise ValueError(
            f"link {text!r}: {quantity!r} is no number with one of {', '.join(units)}; {_EXAMPLE}"
        )
    return float(found.group(1)) * units[found.group(2)]


def _number(text: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"link {text!r}: {value!r} is no number; {_EXAMPLE}") from None


def lognormal(mean_s: float, spread: float) -> tuple[float, float]:
    """(mu, s) of the time of one message, LogNormal(mu, s^2), with this mean, exp(mu + s^2/2), and
    this standard deviation over it (arXiv:2506.10911, the section on latency)."""
    s = math.sqrt(math.log1p(spread**2))
    return math.log(mean_s) - s**2 / 2, s
