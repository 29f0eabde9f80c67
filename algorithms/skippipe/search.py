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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from algorithms.skippipe.bound import lower_bound_s
from algorithms.skippipe.coverage import even_stage_sets, peer_limits, stage_quota
from algorithms.skippipe.draws import Draws
from algorithms.skippipe.pipeline import Pipeline
from algorithms.skippipe.planner import Planner
from algorithms.skippipe.route import Route, Rules, stage_refusals
from algorithms.skippipe.scores import Scores, slots_of
from algorithms.skippipe.untangle import Untangling, plan_effort_s


@dataclass(frozen=True)
class Rejection:
    """Args: phase: `stages`, `memory`, `collisions` or `trades`. reason: in words."""

    phase: str
    reason: str


@dataclass
class Journal:
    """Effort is counted from operations and not by a clock: all machines stop at the same place.

    Args:
        effort_s: what may be spent, in seconds of one usual core, about.
        spent_s: what was spent.
        rejections: in order.
    """

    effort_s: float
    spent_s: float = 0.0
    rejections: list[Rejection] = field(default_factory=list)

    def reject(self, phase: str, reason: str) -> None:
        self.rejections.append(Rejection(phase, reason))

    def spend(self, effort_s: float) -> None:
        self.spent_s += effort_s

    def has_left(self, share: float = 1.0) -> bool:
        """Whether less than this share of the effort is spent."""
        return self.spent_s < share * self.effort_s


WIDTH = 3


@dataclass(frozen=True)
class Limit:
    """Args: what: in words. peers: whose visits count. most: how many of the routes may visit."""

    what: str
    peers: frozenset[int]
    most: int


@dataclass(frozen=True)
class Draft:
    """A route for each slot, and the peers that each may not visit."""

    routes: tuple[Route, ...]
    banned: tuple[frozenset[int], ...]


def settle(
    drafts: Sequence[Draft],
    limits: Sequence[Limit],
    planner: Planner,
    journal: Journal,
    *,
    phase: str,
    plan_effort_s: float,
    share: float,
) -> list[Draft]:
    """Drafts that keep all limits, best first; empty if none was found within the effort."""
    frontier = list(drafts)
    settled: list[Draft] = []
    while frontier and not settled and journal.has_left(share):
        children: dict[tuple[Route, ...], Draft] = {}
        for draft in frontier:
            over = _worst(draft, limits)
            if over is None:
                settled.append(draft)
                continue
            for child in _branches(draft, over, planner, journal, phase, plan_effort_s):
                children.setdefault(child.routes, child)
        ranked = sorted(children.values(), key=lambda draft: _cost(draft, planner))
        for draft in ranked[WIDTH:]:
            journal.reject(phase, f"{WIDTH} better drafts than {_cost(draft, planner)[0]:.3f} s")
        frontier = ranked[:WIDTH]
    return sorted(settled, key=lambda draft: _cost(draft, planner))


def _cost(draft: Draft, planner: Planner) -> tuple[float, float]:
    """(slowest route, sum of all routes)."""
    loops_s = [planner.loop_s(route) for route in draft.routes]
    return max(loops_s), sum(loops_s)


def _visitors(draft: Draft, limit: Limit) -> list[int]:
    return [i for i, route in enumerate(draft.routes) if not limit.peers.isdisjoint(route.peers)]


def _worst(draft: Draft, limits: Sequence[Limit]) -> Limit | None:
    """The limit that is exceeded by most; the first of equal ones."""
    surplus = [len(_visitors(draft, limit)) - limit.most for limit in limits]
    most = max(surplus, default=0)
    return limits[surplus.index(most)] if most > 0 else None


def _branches(
    draft: Draft,
    over: Limit,
    planner: Planner,
    journal: Journal,
    phase: str,
    plan_effort_s: float,
) -> Iterator[Draft]:
    visitors = _visitors(draft, over)
    detours: dict[int, Route] = {}
    for index in visitors:
        route, banned = draft.routes[index], draft.banned[index] | over.peers
        detour = planner.best(route.origin, banned, visited=len(route.peers))
        journal.spend(plan_effort_s)
        if detour is None:
            journal.reject(phase, f"route {index} has no other way than by {over.what}")
        else:
            detours[index] = detour
    surplus = len(visitors) - over.most
    if len(detours) < surplus:
        journal.reject(
            phase, f"{over.what}: {surplus} visits too many, {len(detours)} routes can do without"
        )
        return
    before_s = {index: planner.loop_s(draft.routes[index]) for index in detours}
    fastest = sorted(detours, key=lambda index: (before_s[index], index))
    least = sorted(
        detours, key=lambda index: (planner.loop_s(detours[index]) - before_s[index], index)
    )
    for order in (fastest, least):
        routes, banned_peers = list(draft.routes), list(draft.banned)
        for index in order[:surplus]:
            routes[index] = detours[index]
            banned_peers[index] |= over.peers
        yield Draft(tuple(routes), tuple(banned_peers))


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
    routes = LocalSearch(pipeline, rules, scores, slots, journal, seed).run(routes)
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


_DRAW_EFFORT_S = 3e-5
_PATIENCE = 15  # draws per slot
_BLIND_TRADES = 3


class LocalSearch:
    """Args: slots: of each microbatch of the iteration. seed: of the draws."""

    def __init__(
        self,
        pipeline: Pipeline,
        rules: Rules,
        scores: Scores,
        slots: Sequence[int],
        journal: Journal,
        seed: int,
    ) -> None:
        self._pipeline, self._rules, self._scores = pipeline, rules, scores
        self._slots, self._journal, self._draws = slots, journal, Draws(seed)

    def run(self, routes: tuple[Route, ...]) -> tuple[Route, ...]:
        """The best routes met until the effort is spent."""
        best_routes, best = routes, self._scores.score(routes)
        here, failed = best, 0
        while self._journal.has_left():
            changed = self._traded(routes)
            score = self._scores.score(changed)
            failed += 1
            if score < here:
                routes, here, failed = changed, score, 0
            elif score == here:
                routes = changed
            if here < best:
                best_routes, best = routes, here
            if failed > _PATIENCE * len(routes):
                routes, failed = best_routes, 0
                for _ in range(_BLIND_TRADES):
                    routes = self._traded(routes)
                here = self._scores.score(routes)
        return best_routes

    def _traded(self, routes: tuple[Route, ...]) -> tuple[Route, ...]:
        """After one drawn trade; half of them are tried on the slot that finishes last."""
        self._journal.spend(_DRAW_EFFORT_S)
        finish_s = self._scores.finish_s(routes)
        last = self._slots[max(range(len(finish_s)), key=finish_s.__getitem__)]
        index = last if self._draws.below(2) else self._draws.below(len(routes))
        drawn = random_trade(routes, index, self._pipeline, self._rules, self._draws)
        if drawn is None:
            return routes
        other, (mine, theirs) = drawn
        changed = list(routes)
        changed[index], changed[other] = mine, theirs
        result = tuple(changed)
        if not self._scores.knows(result):
            more_s = self._scores.score(result)[0] - self._scores.score(routes)[0]
            if more_s > 0:
                self._journal.reject("trades", f"routes {index} and {other}: {more_s:+.3f} s")
        return result


Pair = tuple[Route, Route]


def trade_replica(one: Route, other: Route, stage: int, pipeline: Pipeline) -> Pair | None:
    """Both visit the stage, each by the other's replica from now on."""
    mine, theirs = _by_stage(one, pipeline).get(stage), _by_stage(other, pipeline).get(stage)
    if mine is None or theirs is None or mine == theirs:
        return None
    return _replaced(one, mine, theirs), _replaced(other, theirs, mine)


def trade_stage(
    one: Route, other: Route, gives: int, gets: int, pipeline: Pipeline, rules: Rules
) -> Pair | None:
    """The one visits stage `gets` instead of `gives`, the other the reverse."""
    mine, theirs = _by_stage(one, pipeline), _by_stage(other, pipeline)
    if gives not in mine or gives in theirs or gets not in theirs or gets in mine:
        return None
    given, got = mine.pop(gives), theirs.pop(gets)
    mine[gets], theirs[gives] = got, given
    pair = _route(mine), _route(theirs)
    if any(stage_refusals(route.stages(pipeline), rules) for route in pair):
        return None
    return pair


def trade_all(one: Route, other: Route) -> Pair:
    """Each takes the other's way, from its own origin."""
    return (
        Route((one.origin, *other.peers[1:])),
        Route((other.origin, *one.peers[1:])),
    )


def random_trade(
    routes: Sequence[Route], index: int, pipeline: Pipeline, rules: Rules, draws: Draws
) -> tuple[int, Pair] | None:
    """(index of the other route, both after the trade), or None if what was drawn is none."""
    other = draws.below(len(routes))
    one, partner = routes[index], routes[other]
    if other == index or rules.stages == 1:
        return None
    kinds: list[Callable[[], Pair | None]] = [
        lambda: trade_replica(one, partner, 1 + draws.below(rules.stages - 1), pipeline),
        lambda: trade_all(one, partner),
    ]
    if rules.visited < rules.stages:
        kinds.append(lambda: _random_stage_trade(one, partner, pipeline, rules, draws))
    pair = draws.one_of(kinds)()
    if pair is None or pair == (one, partner):
        return None
    return other, pair


def _random_stage_trade(
    one: Route, other: Route, pipeline: Pipeline, rules: Rules, draws: Draws
) -> Pair | None:
    mine, theirs = set(one.stages(pipeline)), set(other.stages(pipeline))
    if mine <= theirs or theirs <= mine:
        return None
    gives, gets = draws.one_of(sorted(mine - theirs)), draws.one_of(sorted(theirs - mine))
    return trade_stage(one, other, gives, gets, pipeline, rules)


def _by_stage(route: Route, pipeline: Pipeline) -> dict[int, int]:
    return {pipeline.stage_of[peer]: peer for peer in route.peers}


def _route(by_stage: dict[int, int]) -> Route:
    return Route(tuple(by_stage[stage] for stage in sorted(by_stage)))


def _replaced(route: Route, old: int, new: int) -> Route:
    return Route(tuple(new if peer == old else peer for peer in route.peers))
