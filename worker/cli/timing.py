"""How `murmur plan` times what it runs on this machine."""

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Repetitions:
    """How often something is timed. Args: untimed: first; enough_s: then no more than `fewest`."""

    untimed: int
    fewest: int
    most: int
    enough_s: float

    def medians(self, run: Callable[[], tuple[float, ...]]) -> tuple[float, ...]:
        """Of what the runs say they took, in seconds."""
        took_s: list[tuple[float, ...]] = []
        for number in range(self.untimed + self.most):
            times_s = run()
            if number >= self.untimed:
                took_s.append(times_s)
            if len(took_s) >= self.fewest and sum(map(sum, took_s)) >= self.enough_s:
                break
        return tuple(statistics.median(each) for each in zip(*took_s, strict=True))


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Torch computes with this many meanwhile."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
