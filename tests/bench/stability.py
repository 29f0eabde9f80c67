"""NoLoCo's stability check beside a Monte-Carlo of 64 replicas, on a grid of (a, c).

    python tests/bench/stability.py [--picture docs/stability.png]

64 replicas with random anchors take the outer update in the groups that `algorithms.pairing` makes,
without pseudo-gradients; what is measured is by how much their variance grows a round. Outside a
band of 0.05 about a spectral radius of 1, check and measurement must agree on every point;
otherwise the exit code is 1. Within it they may not: the check is for infinitely many replicas, 64
are a little more stable, and one course of events grows more slowly than the mean over all. The
picture has both, the exact limit, and the bounds that the paper prints.
"""

import argparse
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from algorithms.noloco import modified_momentum
from algorithms.pairing import groups, membership_epoch
from algorithms.stability import largest_stable_c, paper_bounds, spectral_radius

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BAND = 0.05
REPLICAS = 64
COORDINATES = 16
SETTLING, MEASURED = 50, 200  # rounds
SEED = 1
SIZES = (2, 4)
GRID_A = tuple(np.linspace(0, 0.95, 20).round(3).tolist())
GRID_C = tuple(np.linspace(0.1, 2.9, 29).round(3).tolist())


@dataclass(frozen=True)
class Point:
    """Growth of the replicas' variance a round, as measured and as the check has it."""

    a: float
    c: float
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
    """Prints the share of points that agree, draws them; 1 if any differs outside the band."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--picture", type=Path, default=Path("docs/stability.png"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    wrong = 0
    points = {size: grid(size) for size in SIZES}
    for size, tried in points.items():
        differ = [point for point in tried if not point.agrees]
        outside = [point for point in differ if not point.in_band]
        wrong += len(outside)
        unsafe = sum(
            low < p.c < high and p.measured >= 1
            for p in tried
            for low, high in [paper_bounds(p.a, size)]
        )
        print(
            f"groups of {size}: {len(tried) - len(differ)} of {len(tried)} points agree "
            f"({100 * (1 - len(differ) / len(tried)):.1f} %); {len(differ)} differ, "
            f"{len(outside)} of them outside the band of {BAND} about radius 1; "
            f"the paper's bounds admit {unsafe} that diverge"
        )
        for point in differ:
            where = "in the band" if point.in_band else "OUTSIDE THE BAND"
            print(
                f"  a = {point.a:.2f}, c = {point.c:.2f}: "
                f"measured {point.measured:.3f}, spectral radius {point.exact:.3f}, {where}"
            )
    draw(args.picture, points)
    return 1 if wrong else 0


def grid(size: int) -> list[Point]:
    """Every point of the grid for groups of this size; all see the same groups."""
    members = [members_of_groups(size, round_) for round_ in range(SETTLING + MEASURED)]
    return [
        Point(a, c, growth(a, c, members), spectral_radius(a, c, size))
        for a in GRID_A
        for c in GRID_C
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
    generator = torch.Generator().manual_seed(SEED)
    shape = (REPLICAS, COORDINATES)
    phi = torch.randn(shape, generator=generator, dtype=torch.float64)
    delta, zero = torch.zeros_like(phi), torch.zeros_like(phi)
    log_growth = 0.0
    for round_, of_groups in enumerate(members):
        mean = phi[of_groups].mean(dim=0)
        phi, delta = modified_momentum(phi, delta, zero, mean, a=a, b=0.0, c=c)
        # The update is linear: what counts is by how much it scales the distance from the mean.
        phi, delta = phi - phi.mean(dim=0), delta - delta.mean(dim=0)
        scale = math.sqrt(float(phi.square().sum() + delta.square().sum()))
        phi, delta = phi / scale, delta / scale
        if round_ >= SETTLING:
            log_growth += 2 * math.log(scale)
    return math.exp(log_growth / MEASURED)


def draw(path: Path, points: dict[int, list[Point]]) -> None:
    """A panel for each group size."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it talks about its font cache
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(points), sharey=True, squeeze=False)[0]
    for axes, (size, tried) in zip(panels, points.items(), strict=True):
        draw_panel(axes, size, tried)
    panels[0].set_ylabel("c, pull to the group's mean anchor")
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False
    )
    figure.savefig(path)


def draw_panel(axes: "Axes", size: int, tried: list[Point]) -> None:
    """Points measured, the limit, and the paper's bounds."""
    for label, colour, marker, diverged in (
        (f"{REPLICAS} replicas come together", "#15466b", "o", False),
        ("drift apart", "#c8553d", "x", True),
    ):
        chosen = [(p.a, p.c) for p in tried if (p.measured >= 1) == diverged]
        axes.scatter(*zip(*chosen, strict=True), s=14, c=colour, marker=marker, label=label)
    a = np.linspace(0, 0.999, 400)
    limit = [largest_stable_c(x, size) for x in a]
    axes.plot(a, limit, color="black", linewidth=2, label="exact limit, refused above")
    low, high = zip(*(paper_bounds(x, size) for x in a), strict=True)
    axes.fill_between(a, low, high, color="#e0b040", alpha=0.25, label="between the paper's bounds")
    axes.plot([0.5], [0.7], "*", color="#2e8b57", markersize=13, label="default")
    axes.set(xlabel="a, outer momentum", xlim=(-0.03, 1.0), ylim=(0, 3))
    axes.set_title(f"groups of {size}", loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    raise SystemExit(main())
