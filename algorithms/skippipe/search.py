"""Route search for SkipPipe: equal coverage, bounded memory, few collisions.

    root  every slot's best route by itself
    A     stages: surplus visits are banned until every stage is visited equally often
    B     memory: the same for peers, within the stages that A chose
    C     collisions: conflict-based search over who waits, goes around or trades (untangle.py)
    D     trades: pairs of routes exchange replicas, stages or ways (localsearch.py)

Each microbatch of an origin takes one of its slots in turn: as many as it has memory for. Waves of
microbatches repeat the slots' routes. The answer is judged by the event simulator and set against
a lower bound. Nothing is measured by a clock: the same arguments give the same routes everywhere.

Ref: arXiv:2502.19913.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from algorithms.skippipe.bound import lower_bound_s
from algorithms.skippipe.coverage import even_stage_sets, peer_limits, stage_quota
from algorithms.skippipe.pipeline import Pipeline
from algorithms.skippipe.planner import Planner
from algorithms.skippipe.route import Route, Rules
from algorithms.skippipe.scores import Journal, Rejection, Scores, slots_of
from algorithms.skippipe.settle import Draft, Limit, settle
from algorithms.skippipe.trades import LocalSearch
from algorithms.skippipe.untangle import Untangling, plan_effort_s

EFFORT_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Found:
    """The answer of a search.

    Args:
        routes: of each microbatch, in the order of the origins that were asked for.
        iteration_s: simulated.
        bound_s: no routes within the rules take less.
        first_s: simulated, of the first routes that kept all limits.
        rejections: what was not followed, and why.
        spent_s: effort, in seconds of one usual core, about; counted, not measured.
    """

    routes: tuple[Route, ...]
    iteration_s: float
    bound_s: float
    first_s: float
    rejections: tuple[Rejection, ...]
    spent_s: float

    @property
    def ratio(self) -> float:
        """How many times the lower bound it takes; 1 is optimal."""
        return self.iteration_s / self.bound_s


def search_routes(
    pipeline: Pipeline,
    rules: Rules,
    origins: Sequence[int],
    *,
    seed: int = 0,
    effort_s: float = EFFORT_S,
    shared_uplinks: bool = False,
) -> Found:
    """Searches routes for one iteration.

    Args:
        origins: of each microbatch, replicas of stage 0.
        seed: of the choices among equals and of the trades.
        effort_s: where to stop; the answer is complete even at 0.
        shared_uplinks: as in `simulate`, for the times that decide.

    Raises:
        ValueError: swaps (what is planned must not deadlock), other stages than the pipeline's, or
            an origin that is not on stage 0.
    """
    _check(pipeline, rules, origins)
    journal = Journal(effort_s)
    slots, slot_origins = slots_of(origins, pipeline)
    scores = Scores(pipeline, slots, journal, shared_uplinks=shared_uplinks)
    planner = Planner(pipeline, rules)
    quota = stage_quota(len(slot_origins), rules, seed)
    limits = peer_limits(pipeline, quota)
    drafts = _drafts(pipeline, rules, slot_origins, quota, limits, planner, journal, seed)
    first = min(drafts, key=lambda draft: scores.score(draft.routes))
    untangling = Untangling(pipeline, planner, scores, limits, journal)
    routes = untangling.run(first)
    routes = LocalSearch(pipeline, rules, scores, slots, limits, journal, seed).run(routes)
    return Found(
        routes=tuple(routes[slot] for slot in slots),
        iteration_s=scores.score(routes)[0],
        bound_s=lower_bound_s(pipeline, rules, origins),
        first_s=scores.score(first.routes)[0],
        rejections=tuple(journal.rejections),
        spent_s=journal.spent_s,
    )


def _check(pipeline: Pipeline, rules: Rules, origins: Sequence[int]) -> None:
    if rules.swaps:
        raise ValueError("the search plans ascending routes only: those with swaps can deadlock")
    if rules.stages != len(pipeline.stages):
        raise ValueError(f"rules for {rules.stages} stages, a pipeline of {len(pipeline.stages)}")
    if not origins:
        raise ValueError("there is no microbatch to find a route for")
    if strange := set(origins) - set(pipeline.stages[0]):
        raise ValueError(f"peer {min(strange)} does not serve stage 0: no microbatch begins there")


def _drafts(
    pipeline: Pipeline,
    rules: Rules,
    slot_origins: Sequence[int],
    quota: Sequence[int],
    limits: Sequence[int],
    planner: Planner,
    journal: Journal,
    seed: int,
) -> list[Draft]:
    """Phases A and B; what they cannot settle is dealt out evenly."""
    free = frozenset[int]()
    plan_s = plan_effort_s(pipeline, rules.visited)
    stage_limits = [
        Limit(f"stage {stage}", frozenset(pipeline.stages[stage]), quota[stage])
        for stage in range(1, rules.stages)
    ]
    peer_loads = [
        Limit(f"peer {peer}", frozenset([peer]), limits[peer])
        for replicas in pipeline.stages[1:]
        for peer in replicas
    ]
    drawn = even_stage_sets(len(slot_origins), rules, seed)
    alone = [
        planner.best(origin, visited=len(stages))
        for origin, stages in zip(slot_origins, drawn, strict=True)
    ]
    root = Draft(tuple(route for route in alone if route), (free,) * len(alone))
    assert len(root.routes) == len(alone), "rules admit a route from every origin"
    settled = settle(
        [root], stage_limits, planner, journal, phase="stages", plan_effort_s=plan_s, share=0.25
    )
    chosen = [[route.stages(pipeline) for route in draft.routes] for draft in settled]
    chosen.append(drawn)
    frozen = [_frozen(slot_origins, stages, pipeline, planner) for stages in chosen]
    held = settle(
        frozen, peer_loads, planner, journal, phase="memory", plan_effort_s=plan_s, share=0.5
    )
    return held or [_dealt(draft, pipeline, limits) for draft in frozen]


def _frozen(
    origins: Sequence[int],
    chosen: Sequence[tuple[int, ...]],
    pipeline: Pipeline,
    planner: Planner,
) -> Draft:
    """Every slot by its best route within its stages."""
    everyone = frozenset(range(pipeline.peers))
    banned = []
    routes = []
    for origin, stages in zip(origins, chosen, strict=True):
        allowed = {peer for stage in stages for peer in pipeline.stages[stage]}
        banned.append(everyone - allowed)
        route = planner.best(origin, banned[-1], visited=len(stages))
        assert route is not None, "its stages keep the rules"
        routes.append(route)
    return Draft(tuple(routes), tuple(banned))


def _dealt(draft: Draft, pipeline: Pipeline, limits: Sequence[int]) -> Draft:
    """The same stages; on each, the nearest replica that has room."""
    left = list(limits)
    routes = []
    for route in draft.routes:
        peers = [route.origin]
        for stage in route.stages(pipeline)[1:]:
            edges_s = pipeline.edges[peers[-1]]
            room = [peer for peer in pipeline.stages[stage] if left[peer] > 0]
            peers.append(min(room, key=lambda peer: (edges_s[peer], peer)))
            left[peers[-1]] -= 1
        routes.append(Route(tuple(peers)))
    return Draft(tuple(routes), draft.banned)
