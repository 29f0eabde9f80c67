"""NoLoCo's outer optimizer: modified momentum, which pulls a replica towards its group."""

import math
from dataclasses import dataclass

from torch import Tensor

from algorithms.stability import (
    largest_stable_b,
    largest_stable_c,
    mean_spectral_radius,
    spectral_radius,
)


@dataclass(frozen=True)
class ModifiedMomentum:
    """Heavy ball over the group's mean pseudo-gradient, with a pull to the group's mean anchor.

    momentum <- a * momentum - b * mean(g) - c * (anchor - mean(anchor))
    anchor <- anchor + momentum

    The momentum belongs to one fragment of one replica and never leaves it; the means are over the
    group, the replica included. The paper's 0.5, 0.7, 0.7 are the usual values.

    Args:
        a: share of the momentum that lives on, in 0..1, below 1.
        b: outer learning rate. It does not move replicas apart by itself, but a bowl that the
            local steps go to the bottom of diverges when it is too large.
        c: pull to the group's mean, above 0.
        size: peers in a group; it only decides what is stable.

    Raises:
        ValueError: the replicas would drift apart, with the spectral radius and the nearest value
            that is stable.

    Ref: arXiv:2506.10911 eq. 2 with D = -g (eq. 2 prints the middle term with the other sign).
    """

    a: float = 0.5
    b: float = 0.7
    c: float = 0.7
    size: int = 2

    def __post_init__(self) -> None:
        if self.size < 2:
            raise ValueError(f"group size is {self.size}; it must be at least 2 (2 is a pair)")
        if not 0 <= self.a < 1:
            raise ValueError(f"a is {self.a}; it must be in 0..1, below 1 (0.5 is the usual value)")
        for name, value in (("b", self.b), ("c", self.c)):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(
                    f"{name} is {value}; it must be above 0 (0.7 is the usual value): without c "
                    "replicas do not come together, without b they do not learn"
                )
        limit = largest_stable_c(self.a, self.size)
        if self.c >= limit:
            radius = spectral_radius(self.a, self.c, self.size)
            fix = _below(limit)
            if self.a > 0.5 and self.c < largest_stable_c(0.5, self.size):
                fix += ", or take a = 0.5"
            raise ValueError(self._unstable("c", self.c, radius, fix))
        limit = largest_stable_b(self.a, self.c, self.size)
        if self.b >= limit:
            radius = max(
                spectral_radius(self.a, self.c, self.size, drive=self.b),
                mean_spectral_radius(self.a, self.b),
            )
            raise ValueError(self._unstable("b", self.b, radius, _below(limit)))

    def _unstable(self, name: str, value: float, radius: float, fix: str) -> str:
        return (
            f"{name} is {value}: with a = {self.a} the replicas of groups of {self.size} would "
            f"drift apart (spectral radius {radius:.4g}; it must be below 1); "
            f"the nearest stable value is {name} = {fix}"
        )

    def step(
        self, anchor: Tensor, momentum: Tensor, mean_g: Tensor, mean_anchor: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One outer step; returns fresh (anchor, momentum), all fp32 and of one shape."""
        return modified_momentum(
            anchor, momentum, mean_g, mean_anchor, a=self.a, b=self.b, c=self.c
        )


def _below(limit: float) -> str:
    # Four digits of a value 0.1 % below the limit are still below it.
    return f"{0.999 * limit:.4g}"


def modified_momentum(
    anchor: Tensor,
    momentum: Tensor,
    mean_g: Tensor,
    mean_anchor: Tensor,
    *,
    a: float,
    b: float,
    c: float,
) -> tuple[Tensor, Tensor]:
    """The step itself, for any a, b and c; returns fresh (anchor, momentum).

    Only single multiplications and additions in this order: a fused kernel could round
    differently, and whoever repeats the step must get the same bits.
    """
    new_momentum = (momentum * a).sub_(mean_g * b)
    new_momentum.sub_((anchor - mean_anchor).mul_(c))
    return anchor + new_momentum, new_momentum


def relative_distance(anchor: Tensor, mean_anchor: Tensor) -> float:
    """|anchor - mean| / |mean|: how far a replica is from its group; 0 where all is zero."""
    size = float(mean_anchor.norm())
    return float((anchor - mean_anchor).norm()) / size if size else 0.0
