"""Which layers to which stage: as the run has them, and by what they take and need here."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from algorithms.skippipe.partition import StageMemory, stage_cost, stage_layers
from worker.cli.plan_stages_links import Visits
from worker.cli.plan_stages_timing import StagedModel
from worker.errors import UsageError
from worker.pipeline.profile import visit_held

_WORTH = 0.05  # of the slowest stage
_FP32_BYTES = 4
_TRAINED = 4  # copies: the parameters, their gradient, AdamW's two moments
_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Cut:
    """One cut into S stages.

    Args:
        layers: how many each stage has.
        visit_s: all that a microbatch takes of each stage, by the second sweep.
        memory_bytes: that each stage needs.
    """

    layers: tuple[int, ...]
    visit_s: tuple[float, ...]
    memory_bytes: tuple[int, ...]

    @property
    def slowest_s(self) -> float:
        return max(self.visit_s)

    def document(self) -> dict[str, Any]:
        return {
            "layers": list(self.layers),
            "visit_s": list(self.visit_s),
            "memory_bytes": list(self.memory_bytes),
        }


@dataclass(frozen=True, kw_only=True)
class Cuts:
    """Layers are timed in two sweeps: what suits only the noise of the first is not better.

    Args:
        own: as the run has it; from_settings: as there, else by parameters.
        measured: with the least slowest stage of those that fit, by the first sweep.
        limit_bytes: for a stage; None for no bound.
    """

    own: Cut
    from_settings: bool
    measured: Cut
    limit_bytes: int | None

    @property
    def own_fits(self) -> bool:
        return self.limit_bytes is None or max(self.own.memory_bytes) <= self.limit_bytes

    @property
    def better(self) -> Cut | None:
        """What to take instead of the run's own; None where it fits and is as fast, about."""
        faster = self.measured.slowest_s < (1 - _WORTH) * self.own.slowest_s
        return self.measured if faster or not self.own_fits else None

    @property
    def setting(self) -> str:
        """That makes the measured cut the run's."""
        return f"--set 'stages.layers=[{','.join(map(str, self.measured.layers))}]'"

    def document(self) -> dict[str, Any]:
        return {
            **self.own.document(),
            "source": "settings" if self.from_settings else "parameters",
            "limit_bytes": self.limit_bytes,
            "fits": self.own_fits,
            "better": None if self.better is None else self.better.document(),
        }


def cuts_of(model: StagedModel, *, held: int, committed: int, limit_bytes: int | None) -> Cuts:
    """Compares the run's own cut to the best one.

    Args:
        model: what is cut, timed.
        held: microbatches in flight on a peer.
        committed: copies of the parameters that a peer keeps beside what it trains.
        limit_bytes: for a stage.

    Raises:
        UsageError: no cut fits.
    """
    chosen_by, judged_by = model.sweeps
    each_bytes = _FP32_BYTES * (_TRAINED + committed)
    memory = StageMemory(
        layer_bytes=[
            each_bytes * size + cost.graph_bytes
            for size, cost in zip(model.layer_sizes, judged_by.layers, strict=True)
        ],
        outer_bytes=each_bytes * model.outer_size + judged_by.outer.graph_bytes,
        # What has come back of visits stays for the iteration, as much again.
        stage_bytes=2 * held * visit_held(model.activation_bytes),
        limit_bytes=limit_bytes or 0,
    )

    def told(cut: Sequence[tuple[int, int]]) -> Cut:
        return Cut(
            layers=tuple(last - first + 1 for first, last in cut),
            visit_s=_of_stages(judged_by.visits_s, judged_by.outer.visit_s, cut),
            memory_bytes=tuple(memory.of_stage(n, *layers) for n, layers in enumerate(cut)),
        )

    bound = None if limit_bytes is None else memory
    try:
        found = stage_layers(chosen_by.visits_s, chosen_by.outer.visit_s, len(model.cut), bound)
    except ValueError as error:
        raise UsageError(
            f"--stage-mib: {error}; take more stages, fewer microbatches in flight (--memory), or "
            "smaller batches"
        ) from error
    return Cuts(
        own=told(model.cut),
        from_settings=model.from_settings,
        measured=told(found),
        limit_bytes=limit_bytes,
    )


def visits_of(model: StagedModel) -> Visits:
    """Of each stage of the run's own cut: what its layers took together in the second sweep."""
    layers, outer, cut = model.sweeps[1].layers, model.sweeps[1].outer, model.cut
    return Visits(
        forward_s=np.array(_of_stages([own.forward_s for own in layers], outer.forward_s, cut)),
        backward_s=np.array(_of_stages([own.backward_s for own in layers], outer.backward_s, cut)),
        loss_s=np.full(len(cut), outer.loss_s),
    )


def _of_stages(
    costs_s: Sequence[float], outer_s: float, cut: Sequence[tuple[int, int]]
) -> tuple[float, ...]:
    return tuple(stage_cost(costs_s, outer_s, n, *layers) for n, layers in enumerate(cut))
