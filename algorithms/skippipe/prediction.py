"""What one iteration takes with a routing: its routes, who computes what when, and how good it is.

The same for a prediction as for a run: all peers that know the arguments find the same schedule.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from algorithms.skippipe.bound import lower_bound_s, uplink_bound_s
from algorithms.skippipe.pipeline import Pipeline
from algorithms.skippipe.route import Route, Rules
from algorithms.skippipe.routing import PRESETS
from algorithms.skippipe.search import EFFORT_S, Found, search_routes
from algorithms.skippipe.simulator import Timeline, simulate

NEVER_SKIP = ("full", "stochastic")


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One iteration.

    Args:
        routing: the preset's name.
        rules: those that its routes keep.
        routes: of each microbatch, in the order of the origins.
        timeline: what each peer computes, and when.
        bound_s: no routes within the rules take less.
        found: what the search says of its answer, if there was one.
    """

    routing: str
    rules: Rules
    routes: tuple[Route, ...]
    timeline: Timeline
    bound_s: float
    found: Found | None = None

    @cached_property
    def iteration_s(self) -> float:
        """Until the last microbatch has finished. Raises ValueError where swaps deadlock."""
        return self.timeline.iteration_s

    @property
    def of_bound(self) -> float:
        """How many times the lower bound it takes; 1 is optimal."""
        return self.iteration_s / self.bound_s

    @cached_property
    def utilization(self) -> tuple[float, ...]:
        """Of each peer, the share of the iteration in which it computes."""
        peers = range(len(self.timeline.spans))
        return tuple(self.timeline.busy_s(peer) / self.iteration_s for peer in peers)


def predict(
    pipeline: Pipeline,
    rules: Rules,
    origins: Sequence[int],
    routing: str,
    seed: int = 0,
    *,
    shared_uplinks: bool = False,
    effort_s: float = EFFORT_S,
) -> Prediction:
    """Routes the microbatches of one iteration and simulates it.

    An origin begins its microbatches in order, as many as it has memory for at once; the rest
    follow as others end.

    Args:
        rules: of `random` and `skip`; the others visit all stages whatever the rules let out.
        origins: of each microbatch, replicas of stage 0; several for each as a rule.
        routing: a name in `routing.PRESETS`.
        seed: of the routes; draw it from the iteration's number where they shall differ.
        shared_uplinks: as in `simulate`.
        effort_s: of the search of `skip`.

    Raises:
        ValueError: an unknown routing, no microbatch, or rules that do not fit.
    """
    if routing not in PRESETS:
        raise ValueError(f"no routing {routing!r}; use one of {', '.join(PRESETS)}")
    if not origins:
        raise ValueError("there is no microbatch to predict an iteration of")
    kept = rules_of(routing, rules)
    found = None
    if routing == "skip":
        found = search_routes(
            pipeline, kept, origins, seed=seed, effort_s=effort_s, shared_uplinks=shared_uplinks
        )
        routes = found.routes
    else:
        routes = tuple(PRESETS[routing](pipeline, kept, origins, seed))
    bound_s = lower_bound_s(pipeline, kept, origins)
    if shared_uplinks:
        bound_s = max(bound_s, uplink_bound_s(pipeline, kept, origins))
    return Prediction(
        routing=routing,
        rules=kept,
        routes=routes,
        timeline=simulate(pipeline, routes, shared_uplinks=shared_uplinks),
        bound_s=bound_s,
        found=found,
    )


def rules_of(routing: str, rules: Rules) -> Rules:
    """The rules as a routing keeps them: some never skip."""
    return replace(rules, visited=rules.stages, spread=0) if routing in NEVER_SKIP else rules


def origins_in_turns(pipeline: Pipeline, microbatches: int) -> list[int]:
    """The origins of an iteration: each replica of stage 0 in turn begins so many microbatches."""
    return [origin for _ in range(microbatches) for origin in pipeline.stages[0]]
