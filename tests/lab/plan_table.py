"""Link speeds that Streaming DiLoCo's paper tells for each method, beside those of a simulator.

    python -m tests.lab plan-table

75 entries: five methods, three models, five compute utilizations. An entry is the first of 50
speeds, evenly spaced on a logarithmic scale from 0.1 to 1000 Gbit/s, with which the utilization is
reached; a distance counts points of that grid. The simulator is the paper's, which goes layer by
layer; ours sends a fragment as a whole after its step (`murmuration.algorithms.utilization`).

Ref: arXiv:2501.18512.
"""

from dataclasses import dataclass, replace

import numpy as np

from murmuration.algorithms.fragments import layer_of
from murmuration.algorithms.utilization import Floats, SerialLink, event_steps
from murmuration.algorithms.workload import PlannedRounds, Workload

GRID_GBPS = np.logspace(-1, 3, 50)
TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)
# Of what one worker sends for a parameter. The paper does not tell it; this fits its table best.
EFFECTIVE_BITS = 13.4
LAYERS_A_FRAGMENT = 3
WARM_PERIODS, COUNTED_PERIODS = 4, 4

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
    rounds = PlannedRounds(
        inner_steps=how.inner_steps,
        overlap_steps=how.overlap_steps,
        fragments=fragments,
        fragment_bits=tuple(EFFECTIVE_BITS * how.bits * f.elements for f in fragments),
    )
    reached = utilization_by_layer(workload, rounds, GRID_GBPS * 1e3)
    return [int((reached < target).sum()) for target in TARGETS]


def utilization_by_layer(workload: Workload, rounds: PlannedRounds, rates_mbps: Floats) -> Floats:
    """Computing time over all time at each link speed, of a step that goes layer by layer.

    A step is 3L-1 nodes of equal length: the forward passes of layers 1..L, then for layers L..1
    the backward pass to the activations (not for layer 1) and that to the parameters. Of the
    fragments due after step s, layer l is ready after its backward pass of step s, and the forward
    pass of layer l in step s + 1 + tau waits for it. What is outside of the layers is ready last
    and needed first.
    """
    link = SerialLink(1 / (rates_mbps * 1e6), 0.0)
    sends = sends_by_layer(workload, rounds)
    after, layers = rounds.overlap_steps + 1, len(workload.layers)
    forward_s = layers * workload.step_s / (3 * layers - 1)
    begin = WARM_PERIODS * rounds.inner_steps
    end = begin + COUNTED_PERIODS * rounds.inner_steps
    now_s, done, flight = np.zeros(link.rates), 0, dict[int, Floats]()
    ends = {}
    for step in sorted({*event_steps(rounds, after, end), begin, end}):
        now_s = now_s + (step - done - 1) * workload.step_s + forward_s
        done = step
        if (earliest_s := flight.pop(step - after, None)) is not None:
            now_s = np.maximum(now_s, earliest_s)
        if (due := sends.get((step - 1) % rounds.inner_steps + 1)) is not None:
            ready_s, needed_s, bits = due
            there_s = link.send(now_s[:, None] + ready_s, bits)
            flight[step] = (there_s + needed_s).max(axis=1)
        now_s = now_s + (workload.step_s - forward_s)
        ends[step] = now_s
    computing_s = COUNTED_PERIODS * rounds.inner_steps * workload.step_s
    return np.minimum(computing_s / (ends[end] - ends[begin]), 1.0)


def sends_by_layer(workload: Workload, rounds: PlannedRounds) -> dict[int, Floats]:
    """What is sent after each step of the period, in order, shape (3, parts).

    Rows: from the end of the forward pass until it is ready, from where it is awaited until the
    end of the forward pass, and its bits.
    """
    layers = len(workload.layers)
    node_s = workload.step_s / (3 * layers - 1)
    sends = {}
    for step, due in rounds.due().items():
        parts = []
        for index in due:
            fragment, bits = rounds.fragments[index], rounds.fragment_bits[index]
            for spec in fragment.specs:
                layer = layer_of(spec.name) or 0
                ready = 2 * (layers - layer) if layer else 2 * layers - 1
                share = spec.elements / fragment.elements
                parts.append((ready * node_s, (layers - layer) * node_s, bits * share))
        sends[step] = np.array(sorted(parts)).T
    return sends


def nearest_point(gbps: float) -> int:
    """Index of the grid point that the paper rounded."""
    return int(np.abs(np.log(GRID_GBPS / gbps)).argmin())


if __name__ == "__main__":
    raise SystemExit(main())
