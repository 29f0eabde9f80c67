"""Link speeds that Streaming DiLoCo's paper tells for each method, beside those of our simulator.

    python tests/bench/plan_table.py

75 entries: five methods, three models, five compute utilizations. An entry is the first of 50
speeds, evenly spaced on a logarithmic scale from 0.1 to 1000 Gbit/s, with which the utilization is
reached; a distance counts points of that grid.

Ref: arXiv:2501.18512.
"""

from dataclasses import dataclass, replace

import numpy as np

from algorithms.utilization import Rounds, Workload, utilization

GRID_GBPS = np.logspace(-1, 3, 50)
TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)
# Of what one worker sends for a parameter. The paper does not tell it; this fits its table best.
EFFECTIVE_BITS = 13.4
LAYERS_A_FRAGMENT = 3

MODELS = {
    "1B": Workload(step_s=0.1, layers=(1_000_000_000 // 24,) * 24),
    "10B": Workload(step_s=0.8, layers=(10_000_000_000 // 48,) * 48),
    "100B": Workload(step_s=4.9, layers=(100_000_000_000 // 108,) * 108),
}


@dataclass(frozen=True)
class Method:
    """Args: H, whether in fragments, tau, and bits relative to the first method's."""

    inner_steps: int
    streaming: bool = False
    overlap_steps: int = 0
    bits: float = 1.0


_STREAMING = Method(100, streaming=True)
METHODS = {
    "data-parallel": Method(1),
    "DiLoCo": Method(100),
    "Streaming": _STREAMING,
    "+ overlap": replace(_STREAMING, overlap_steps=1),
    "+ FP4": replace(_STREAMING, overlap_steps=1, bits=1 / 4),
}

# fmt: off
PAPER_GBPS: dict[tuple[str, str], tuple[float, ...]] = {
    ("data-parallel", "1B"): (86.8, 152.6, 184.2, 222.3, 569.0),
    ("data-parallel", "10B"): (104.8, 222.3, 222.3, 268.3, 471.5),
    ("data-parallel", "100B"): (184.2, 323.8, 390.7, 390.7, 471.5),
    ("DiLoCo", "1B"): (1.4, 6.2, 13.3, 23.3, 86.8),
    ("DiLoCo", "10B"): (1.7, 7.5, 16.0, 33.9, 104.8),
    ("DiLoCo", "100B"): (3.0, 11.0, 23.3, 49.4, 184.2),
    ("Streaming", "1B"): (1.4, 5.2, 9.1, 16.0, 28.1),
    ("Streaming", "10B"): (1.7, 5.2, 9.1, 13.3, 19.3),
    ("Streaming", "100B"): (2.4, 6.2, 9.1, 11.0, 19.3),
    ("+ overlap", "1B"): (1.4, 4.3, 6.2, 9.1, 11.0),
    ("+ overlap", "10B"): (1.7, 3.6, 5.2, 6.2, 7.5),
    ("+ overlap", "100B"): (1.7, 3.6, 4.3, 5.2, 5.2),
    ("+ FP4", "1B"): (0.4, 0.9, 1.7, 2.0, 3.0),
    ("+ FP4", "10B"): (0.4, 0.9, 1.4, 1.4, 1.7),
    ("+ FP4", "100B"): (0.5, 0.9, 1.1, 1.1, 1.4),
}
# fmt: on


def main() -> int:
    """Prints each entry of the paper beside ours; 1 if any is more than a grid point away."""
    print("Gbit/s for a compute utilization of (paper / ours)")
    print(f"{'method':<14}{'model':>5}  " + "".join(f"{100 * t:>15.0f} %" for t in TARGETS))
    distances: list[int] = []
    for (method, model), wanted in PAPER_GBPS.items():
        cells = []
        for paper, ours in zip(wanted, first_points(method, model), strict=True):
            distances.append(ours - nearest_point(paper))
            mark = f"{distances[-1]:+d}" if distances[-1] else "  "
            cells.append(f"{paper:6.1f} /{GRID_GBPS[ours]:6.1f}{mark}")
        print(f"{method:<14}{model:>5}  " + " ".join(f"{cell:>16}" for cell in cells))
    within = sum(abs(distance) <= 1 for distance in distances)
    print(
        f"{within} of {len(distances)} within one point of the grid, {distances.count(0)} on it; "
        f"largest distance {max(map(abs, distances))}"
    )
    return 0 if within == len(distances) else 1


def first_points(method: str, model: str) -> list[int]:
    """Index of the first grid point that reaches each target, `GRID_GBPS.size` if none does."""
    how, workload = METHODS[method], MODELS[model]
    count = len(workload.layers) // LAYERS_A_FRAGMENT if how.streaming else 1
    fragments = workload.fragments(count)
    rounds = Rounds(
        inner_steps=how.inner_steps,
        overlap_steps=how.overlap_steps,
        fragments=fragments,
        fragment_bits=tuple(EFFECTIVE_BITS * how.bits * f.elements for f in fragments),
    )
    reached = utilization(workload, rounds, GRID_GBPS * 1e3, per_layer=True)
    return [int((reached < target).sum()) for target in TARGETS]


def nearest_point(gbps: float) -> int:
    """Index of the grid point that the paper rounded."""
    return int(np.abs(np.log(GRID_GBPS / gbps)).argmin())


if __name__ == "__main__":
    raise SystemExit(main())
