"""Outer optimizers of replicas that exchange in small groups, and when they come together.

A group exchanges anchors, which go ahead while the peers compute, and contributions, when the round
is due: of one fragment each, fp32, 1-D. `SharedMomentum` is ours, `ModifiedMomentum` the paper's.

Ref: arXiv:2506.10911 eq. 2. Its bound on our c is not safe: the limits below are of the exact
recursion of the replicas' second moments (docs/evidence/pairs.md).
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


class GroupUpdate(ABC):
    """One replica's outer update. Only single multiplications and additions: a fused kernel could
    round differently, and a peer that repeats the step must get the same bits."""

    def contribution(self, g: Tensor, momentum: Tensor) -> Tensor:
        """The form in which a pseudo-gradient is exchanged."""
        return g

    def early_start(self, mean_anchor: Tensor) -> Tensor | None:
        """The start of the inner steps once the group's mean anchor is known, before the round
        itself; None for the replica's own anchor."""
        return None

    @abstractmethod
    def step(
        self, anchor: Tensor, momentum: Tensor, mean: Tensor, mean_anchor: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One outer step by the group's mean contribution; returns fresh (anchor, momentum)."""


@dataclass(frozen=True)
class SharedMomentum(GroupUpdate):
    """Heavy ball from the group's mean anchor, with the group's mean momentum. Raises ValueError: a
    value out of its range; or the mean of the replicas would diverge in a bowl whose bottom local
    steps reach, with the radius and the nearest value that is stable.

    momentum <- mean(a * momentum + g)
    anchor   <- mean(anchor) - b * momentum

    Ref: ours (docs/adr/0013); pairs, and the exchange of both halves, are arXiv:2506.10911's."""

    a: float  # share of the momentum that lives on, in 0..1, below 1
    b: float  # outer learning rate, above 0

    def __post_init__(self) -> None:
        if not 0 <= self.a < 1:
            raise ValueError(f"a is {self.a}; it must be in 0..1, below 1 (0.3 is the usual value)")
        if not 0 < self.b < math.inf:
            raise ValueError(f"b is {self.b}; it must be above 0 (1.5 is the usual value)")
        limit = largest_stable_step(self.a)
        if self.b >= limit:
            radius = mean_spectral_radius(self.a, self.b)
            raise ValueError(
                f"b is {self.b}: with a = {self.a} the replicas would diverge together (spectral "
                f"radius {radius:.4g}; it must be below 1); the nearest stable value is "
                f"b = {_below(limit)}"
            )

    def contribution(self, g: Tensor, momentum: Tensor) -> Tensor:
        return (momentum * self.a).add_(g)

    def early_start(self, mean_anchor: Tensor) -> Tensor:
        return mean_anchor

    def step(
        self, anchor: Tensor, momentum: Tensor, mean: Tensor, mean_anchor: Tensor
    ) -> tuple[Tensor, Tensor]:
        return mean_anchor - mean * self.b, mean.clone()


@dataclass(frozen=True)
class ModifiedMomentum(GroupUpdate):
    """Heavy ball over the group's mean pseudo-gradient, with a pull to the group's mean anchor.
    Raises ValueError: the replicas would drift apart, with the nearest value that is stable.

    momentum <- a * momentum - b * mean(g) - c * (anchor - mean(anchor))
    anchor <- anchor + momentum

    The momentum belongs to one fragment of one replica and never leaves it; the means are over the
    group, the replica included. The default a and b are the paper's, c is that of its code.

    Ref: arXiv:2506.10911 eq. 2 with D = -g (eq. 2 prints the middle term with the other sign)."""

    a: float = 0.5  # share of the momentum that lives on, in 0..1, below 1
    b: float = 0.7  # outer learning rate, above 0
    c: float = 0.7  # pull to the group's mean, above 0
    size: int = 2  # peers in a group, at least 2; it only decides what is stable

    def __post_init__(self) -> None:
        if not 0 <= self.a < 1:
            raise ValueError(f"a is {self.a}; it must be in 0..1, below 1 (0.5 is the usual value)")
        for name, value in (("b", self.b), ("c", self.c)):
            if not 0 < value < math.inf:
                raise ValueError(
                    f"{name} is {value}; it must be above 0 (0.7 is the usual value): without c "
                    "replicas do not come together, without b they do not learn"
                )
        a, b, c, size = self.a, self.b, self.c, self.size
        if c >= (limit := largest_stable_c(a, size)):
            name, value, radius = "c", c, spectral_radius(a, c, size)
        elif b >= (limit := largest_stable_b(a, c, size)):
            name, value = "b", b
            radius = max(spectral_radius(a, c, size, drive=b), mean_spectral_radius(a, b))
        else:
            return
        fix = f"{name} = {_below(limit)}"
        if name == "c" and a > 0.5 and c < largest_stable_c(0.5, size):
            fix += ", or take a = 0.5"
        raise ValueError(
            f"{name} is {value}: with a = {a} the replicas of groups of {size} would drift apart "
            f"(spectral radius {radius:.4g}; it must be below 1); the nearest stable value is {fix}"
        )

    def step(
        self, anchor: Tensor, momentum: Tensor, mean: Tensor, mean_anchor: Tensor
    ) -> tuple[Tensor, Tensor]:
        new_momentum = (momentum * self.a).sub_(mean * self.b)
        new_momentum.sub_((anchor - mean_anchor).mul_(self.c))
        return anchor + new_momentum, new_momentum


def _below(limit: float) -> str:
    # Four digits of a value 0.1 % below the limit are still below it.
    return f"{0.999 * limit:.4g}"


def relative_distance(anchor: Tensor, mean_anchor: Tensor) -> float:
    """|anchor - mean| / |mean|: how far a replica is from its group; 0 where all is zero."""
    size = float(mean_anchor.norm())
    return float((anchor - mean_anchor).norm()) / size if size else 0.0


def spectral_radius(a: float, c: float, size: int = 2, drive: float = 0.0) -> float:
    """The growth of the replicas' variance a round, in the long run; below 1 is stable. Args: a:
    outer momentum; c: pull towards the group's mean anchor; size: peers in a group; drive: 0 for
    the replicas by themselves, b in a bowl whose bottom the local steps reach."""
    q = (size - 1) / size
    return _radius(a, q * c + drive / size, q * c * c + drive * drive / size)


def mean_spectral_radius(a: float, drive: float) -> float:
    """The same of the mean over all replicas, which is heavy ball: the growth of its square."""
    return _radius(a, drive, drive * drive)


def largest_stable_step(a: float) -> float:
    """The limit that b must stay below for that mean, in a bowl whose bottom local steps reach."""
    return 2 * (1 + a)


def largest_stable_c(a: float, size: int = 2) -> float:
    """The limit that c must stay below, for 0 <= a < 1; without drive. It is 2(1 - a^2) for pairs,
    and grows with the group, to 2(1 + a) where all are in one."""
    q = (size - 1) / size
    return 2 * (1 - a * a) / (1 + a - 2 * a * q)


def largest_stable_b(a: float, c: float, size: int = 2) -> float:
    """The limit that b must stay below, for 0 <= a < 1 and a stable c. A smaller drive is stable if
    none and all of it are: the condition is concave in it."""
    q, square = (size - 1) / size, (1 + a) / size - 2 * a / size**2
    linear = -2 * (1 - a * a) / size - 4 * a * c * q / size
    constant = c * c * q * (1 + a) - 2 * c * q * (1 - a * a) - 2 * a * (c * q) ** 2
    root = (-linear + math.sqrt(linear * linear - 4 * square * constant)) / (2 * square)
    return min(root, largest_stable_step(a))


def _radius(a: float, r: float, s: float) -> float:
    """The spectral radius of the 3x3 matrix that takes (P, X, D) to those of the next round."""
    to_delta = np.array([s, -2 * a * r, a * a])
    to_product = to_delta + np.array([-r, a, 0.0])
    to_phi = to_product + np.array([1 - r, a, 0.0])
    matrix: NDArray[np.float64] = np.array([to_phi, to_product, to_delta])
    return float(np.abs(np.linalg.eigvals(matrix)).max())
