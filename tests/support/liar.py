"""A worker with a valid certificate that contributes something else than it has learned.

    python -m tests.support.liar "sign flip x100" murmur's arguments...

The rest of it is `murmur` itself, so that the others can tell it by its contributions alone.
"""

import sys
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from murmuration.worker.cli import main
from murmuration.worker.exchange.allreduce.contributor import Contributor
from murmuration.worker.training.inbox import Begin

Lie = Callable[[Tensor], Tensor]


def noise(values: Tensor) -> Tensor:
    """As large as may count: three times the others' norm, as far as this peer knows it."""
    drawn = torch.randn(values.shape)
    return drawn * (2.9 * values.norm() / drawn.norm())


def first_again() -> Lie:
    """Whatever it learned in its first round, for ever."""
    kept: dict[int, Tensor] = {}
    return lambda values: kept.setdefault(values.numel(), values.clone())


LIES: dict[str, Lie] = {
    "sign flip x100": lambda values: -100 * values,
    "1e15 everywhere": lambda values: torch.full_like(values, 1e15),
    "NaN": lambda values: torch.full_like(values, torch.nan),
    "sign flip within the limit": lambda values: -2.9 * values,
    "noise within the limit": noise,
    "its first round again and again": first_again(),
}


def contribute_instead(lie: Lie) -> None:
    """From now on this process contributes lies."""
    honest = Contributor.begin

    async def begin(self: Contributor, begin: Begin) -> None:
        await honest(self, replace(begin, values=lie(begin.values)))

    Contributor.begin = begin  # type: ignore[method-assign]


if __name__ == "__main__":
    contribute_instead(LIES[sys.argv.pop(1)])
    main()
