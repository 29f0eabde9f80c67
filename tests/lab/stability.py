"""The stability checks of pairs beside a Monte-Carlo of 64 replicas.

    python -m tests.lab stability

64 replicas with random anchors take the outer update in groups by `murmuration.algorithms.pairing`.
NoLoCo's, on a grid of (a, c), goes without pseudo-gradients: what is measured is by how much the
replicas' variance grows a round. Replicas that share their momentum always come together, so theirs
is by how much their distance from the bottom of a bowl grows, on a grid of a and of b times the
share of the way there that local steps go; and by how much their variance does on flat ground.

Outside a band of 0.05 about a spectral radius of 1, check and measurement must agree on every
point; otherwise the exit code is 1. Within it they may not: the check is for infinitely many
replicas, 64 are a little more stable, and one course of events grows more slowly than the mean over
all.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from murmuration.algorithms.noloco import (
    SharedMomentum,
    mean_spectral_radius,
    modified_momentum,
    spectral_radius,
)
from murmuration.algorithms.pairing import groups, membership_epoch

BAND = 0.05
REPLICAS = 64
COORDINATES = 16
SETTLING, MEASURED = 50, 200  # rounds
SEED = 1
SIZES = (2, 4)
GRID_A = tuple(np.linspace(0, 0.95, 20).round(3).tolist())
GRID_C = tuple(np.linspace(0.1, 2.9, 29).round(3).tolist())
GRID_DRIVE = tuple(np.linspace(0.1, 4.5, 23).round(3).tolist())


Step = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Point:
    """Growth of a variance a round, as measured and as the check has it.

    Args:
        value: c, or the drive of replicas that share their momentum.
    """

    a: float
    value: float
    measured: float
    exact: float

    @property
    def agrees(self) -> bool:
        """Whether both say the same of its stability."""
        return (self.measured < 1) == (self.exact < 1)

    @property
    def in_band(self) -> bool:
        """Whether it is too near the limit to measure."""
        return abs(self.exact - 1) < BAND


def main() -> int:
    """Prints the share of points that agree; 1 if any differs outside the band."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    wrong = 0
    for size in SIZES:
        tried = grid(size)
        unsafe = sum(
            low < p.value < high and p.measured >= 1
            for p in tried
            for low, high in [paper_bounds(p.a, size)]
        )
        wrong += told(f"groups of {size}", "c", tried)
        print(f"  the paper's bounds admit {unsafe} that diverge")
    wrong += told("shared momentum", "drive", shared_grid())
    members = [members_of_groups(2, round_) for round_ in range(SETTLING + MEASURED)]
    flat = shared_growth(0.3, 0.0, members, mean=False)
    print(
        f"  on flat ground their variance grows by {flat:.3f} a round (a = 0.3), exactly "
        f"{shared_spectral_radius(0.3):.3f}"
    )
    return 1 if wrong else 0


def told(name: str, of: str, tried: list[Point]) -> int:
    """Prints how many points agree, and each that does not; how many of those are not in the
    band."""
    differ = [point for point in tried if not point.agrees]
    outside = [point for point in differ if not point.in_band]
    print(
        f"{name}: {len(tried) - len(differ)} of {len(tried)} points agree "
        f"({100 * (1 - len(differ) / len(tried)):.1f} %); {len(differ)} differ, "
        f"{len(outside)} of them outside the band of {BAND} about radius 1"
    )
    for point in differ:
        where = "in the band" if point.in_band else "OUTSIDE THE BAND"
        print(
            f"  a = {point.a:.2f}, {of} = {point.value:.2f}: "
            f"measured {point.measured:.3f}, spectral radius {point.exact:.3f}, {where}"
        )
    return len(outside)


def grid(size: int) -> list[Point]:
    """Every point of the grid for groups of this size; all see the same groups."""
    members = [members_of_groups(size, round_) for round_ in range(SETTLING + MEASURED)]
    return [
        Point(a, c, growth(a, c, members), spectral_radius(a, c, size))
        for a in GRID_A
        for c in GRID_C
    ]


def shared_grid() -> list[Point]:
    """Every point of the grid of pairs that share their momentum, as far from the bottom."""
    members = [members_of_groups(2, round_) for round_ in range(SETTLING + MEASURED)]
    return [
        Point(a, d, shared_growth(a, d, members, mean=True), mean_spectral_radius(a, d))
        for a in GRID_A
        for d in GRID_DRIVE
    ]


def members_of_groups(size: int, round_: int) -> Tensor:
    """Indices, of shape (size, replicas): column i holds the members of replica i's group."""
    names = [f"{index:02d}" for index in range(REPLICAS)]
    members = torch.zeros(size, REPLICAS, dtype=torch.long)
    for group in groups(SEED, 0, round_, membership_epoch(names), names, size):
        indices = torch.tensor([int(name) for name in group])
        members[:, indices] = indices[:, None]
    return members


def growth(a: float, c: float, members: list[Tensor]) -> float:
    """The factor by which the variance of the replicas grows a round, once it has settled."""

    def step(phi: Tensor, delta: Tensor, of_groups: Tensor) -> tuple[Tensor, Tensor]:
        mean = phi[of_groups].mean(dim=0)
        return modified_momentum(phi, delta, torch.zeros_like(phi), mean, a=a, b=0.0, c=c)

    return growth_under(step, members, mean=False)


def shared_growth(a: float, drive: float, members: list[Tensor], *, mean: bool) -> float:
    """The same of replicas that share their momentum; with `mean`, of their squared distance from
    the bottom of the bowl."""
    update = SharedMomentum(a, 1.0)  # what counts is the product of b and the pseudo-gradient

    def step(phi: Tensor, momentum: Tensor, of_groups: Tensor) -> tuple[Tensor, Tensor]:
        sent = update.contribution(phi * drive, momentum)
        return update.step(phi, momentum, sent[of_groups].mean(dim=0), phi[of_groups].mean(dim=0))

    return growth_under(step, members, mean=mean)


def growth_under(step: Step, members: list[Tensor], *, mean: bool) -> float:
    """The factor by which the squares grow a round, from the mean over all replicas or, with
    `mean`, from zero."""
    generator = torch.Generator().manual_seed(SEED)
    phi = torch.randn((REPLICAS, COORDINATES), generator=generator, dtype=torch.float64)
    momentum = torch.zeros_like(phi)
    log_growth = 0.0
    for round_, of_groups in enumerate(members):
        phi, momentum = step(phi, momentum, of_groups)
        # The update is linear: what counts is by how much it scales.
        if not mean:
            phi, momentum = phi - phi.mean(dim=0), momentum - momentum.mean(dim=0)
        scale = math.sqrt(float(phi.square().sum() + momentum.square().sum()))
        phi, momentum = phi / scale, momentum / scale
        if round_ >= SETTLING:
            log_growth += 2 * math.log(scale)
    return math.exp(log_growth / MEASURED)


def paper_bounds(a: float, size: int = 2) -> tuple[float, float]:
    """What the paper asks of its gamma: above the first, below the second. Not safe.

    sqrt(n/(2(n-1))) * a < c < sqrt(n/(2(n-1)) * (2 + a^2)). For pairs the upper one meets the exact
    limit at a = 0.5 only: beyond, it admits what diverges (all that it admits at a = 0.9). The
    lower one refuses what is stable.
    """
    factor = size / (2 * (size - 1))
    return math.sqrt(factor) * a, math.sqrt(factor * (2 + a * a))


def shared_spectral_radius(a: float, size: int = 2, drive: float = 0.0) -> float:
    """`spectral_radius` where a group shares anchor and momentum: each of its members ends a round
    with one heavy-ball step of the group's mean, whose deviation from the mean over all replicas
    has 1/size of a member's second moments. Where the mean does not diverge, neither do they.

    Ref: docs/adr/0013.
    """
    return mean_spectral_radius(a, drive) / size


if __name__ == "__main__":
    raise SystemExit(main())
