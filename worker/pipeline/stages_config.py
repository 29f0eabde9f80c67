"""How a model is cut into stages, and how microbatches are routed through them."""

from dataclasses import dataclass

from murmuration.algorithms.skippipe.pipeline import spans, stage_layers
from murmuration.algorithms.skippipe.route import Rules, visited_stages
from murmuration.algorithms.skippipe.search import ROUTINGS
from murmuration.worker.tasks import Staged

_MOST_ORIGINS = 1024
ACTIVATIONS = ("bf16", "fp32", "int8")


@dataclass(frozen=True, kw_only=True)
class StagesConfig:
    """The stages of a model, and the routes through them.

    Ref: arXiv:2502.19913 (skips), arXiv:2301.11913 (stochastic), arXiv:2506.15461 (rebuild)."""

    count: int = 1  # stages S; 1 leaves the model whole
    # How many layers each stage has; empty shares them out by their parameters.
    layers: tuple[int, ...] = ()
    routing: str = "full"  # a preset of `murmuration.algorithms.skippipe.search`
    # Share of the stages that a route leaves out, stage 0 counted among the visited.
    skip: float = 0.0
    full_every: int = 0  # all routes are full in one of this many iterations; 0 for never
    # Of each origin (a replica of stage 0) and iteration; a batch of the task each.
    microbatches: int = 8
    activations: str = "bf16"  # codec of what travels between stages, and of its gradients
    # What stage calls may hold on this machine between forward and backward, MiB; their replies may
    # hold as much again. Each machine has its own.
    memory_mib: float = 64.0
    # Whether peers move to another stage: to one that is far slower than theirs, or whose last
    # replica is gone; that one is rebuilt from its neighbours.
    rebuild: bool = True

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"count is {self.count}; a model has at least 1 stage")
        shown = list(self.layers)
        if not all(type(count) is int and count >= 1 for count in shown):
            raise ValueError(f"layers is {shown}; each stage has a whole number of at least 1")
        if shown and len(shown) != self.count:
            raise ValueError(
                f"layers is {shown}, of {len(shown)} stages, but count is {self.count}; "
                f"write one number for each stage, or set count to {len(shown)}"
            )
        if self.routing not in ROUTINGS:
            raise ValueError(f"routing is {self.routing!r}; use one of {', '.join(ROUTINGS)}")
        if self.activations not in ACTIVATIONS:
            raise ValueError(
                f"activations is {self.activations!r}; use one of {', '.join(ACTIVATIONS)}"
            )
        if self.microbatches < 1 or self.full_every < 0 or self.memory_mib <= 0:
            raise ValueError(
                "microbatches must be at least 1, full_every 0 or more, memory_mib > 0"
            )
        if not 0 <= self.skip < 1:
            raise ValueError(f"skip is {self.skip}; it must be 0 or more, below 1")
        if self.skip and self.routing not in ("skip", "random"):
            raise ValueError(
                f"routing {self.routing!r} visits every stage: leave out skip, or route by 'skip' "
                "or 'random'"
            )
        if self.count > 1:
            self.rules(1)
            if round(self.count * (1 - self.skip)) < 2:
                fix = f"at most {self.count - 2}: set skip to {1 - 2 / self.count:.2f} or less"
                if self.count == 2:
                    fix = "none: leave skip out, or cut the model into 3 stages or more"
                raise ValueError(
                    f"skip is {self.skip}; every route visits stage 0 and another, so of "
                    f"{self.count} stages it can leave out {fix}"
                )

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_mib * 2**20)

    @property
    def most_visits(self) -> int:
        """The most visits of a stage in an iteration, with as many origins as can be."""
        return self.microbatches * _MOST_ORIGINS if self.count > 1 else 1

    def rules(self, iteration: int) -> Rules:
        """The rules of an iteration's routes. Raises ValueError: none could keep them."""
        if self.full_every > 0 and iteration % self.full_every == 0:
            return Rules(stages=self.count, visited=self.count)
        return Rules(stages=self.count, visited=visited_stages(self.count, self.skip))


def cut_of(task: Staged, stages: StagesConfig) -> list[tuple[int, int]]:
    """The first and the last layer of each stage, both included; the same on every peer. Raises
    ValueError: more stages than layers, or other layers in the settings than in the model."""
    sizes = task.layer_sizes()
    if not stages.layers:
        return stage_layers(sizes, task.outer_size(), stages.count)
    if sum(stages.layers) != len(sizes):
        raise ValueError(
            f"layers is {list(stages.layers)}, {sum(stages.layers)} in all, but the model has "
            f"{len(sizes)}; write {stages.count} numbers that add up to {len(sizes)}, or leave "
            "layers out to have them shared out"
        )
    return spans(stages.layers)
