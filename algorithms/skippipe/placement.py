"""Which peer serves which stage: a genetic search over partitions of the peers.

    score = slowest exchange inside a stage + 2 x tour over the stages from stage 0 and back

where a step of the tour costs the bottleneck matching of the two stages' replicas: every replica
has a lane of its own. Stages of equal size have no order until the tour gives them one. As one
swap seldom lowers a maximum, the search is guided by the same sum over means besides.

Ref: DT-FM, arXiv:2206.01288 section 4; ours: stage 0 is fixed as the tour's beginning, sizes
may differ, and children are improved by random swaps rather than by a local optimum.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from algorithms.skippipe.draws import Draws
from algorithms.skippipe.pipeline import Floats

Groups = tuple[tuple[int, ...], ...]
_Cost = tuple[float, float]

POPULATION = 24
_SWAPS = 6  # tried on each child


@dataclass(frozen=True)
class Placement:
    """Args: stages: the peers of each stage. score_s: see above; lower is better."""

    stages: Groups
    score_s: float


def stage_sizes(peers: int, stage_load_s: Sequence[float]) -> tuple[int, ...]:
    """How many replicas each stage gets: the next peer always goes to the most loaded stage.

    Args:
        peers: at least one for each stage.
        stage_load_s: of each stage, the time of a visit times how often it is visited.

    Raises:
        ValueError: fewer peers than stages.
    """
    if peers < len(stage_load_s):
        raise ValueError(f"{peers} peers cannot serve {len(stage_load_s)} stages: add peers")
    sizes = [1] * len(stage_load_s)
    for _ in range(peers - len(sizes)):
        loads_s = [load_s / size for load_s, size in zip(stage_load_s, sizes, strict=True)]
        sizes[loads_s.index(max(loads_s))] += 1
    return tuple(sizes)


def place(
    sizes: Sequence[int],
    edge_s: Floats,
    exchange_s: Floats,
    *,
    seed: int = 0,
    children: int = 1500,
) -> Placement:
    """Searches a placement.

    Args:
        sizes: replicas of each stage.
        edge_s: of one microbatch's activations between two peers, shape (P, P).
        exchange_s: of a stage's parameters between two replicas of it, shape (P, P).
        children: how many partitions to try after the first random ones.

    Raises:
        ValueError: sizes that do not add up to the peers.
    """
    if sum(sizes) != len(edge_s) or min(sizes) < 1:
        raise ValueError(f"stages of sizes {tuple(sizes)} do not share out {len(edge_s)} peers")
    draws, score = Draws(seed), PlacementScore(edge_s, exchange_s)
    free_order = len(set(sizes[1:])) <= 1

    def guided(groups: Groups) -> _Guided:
        placed = score.toured(groups) if free_order else groups
        score_s, mean_s = score.of(placed)
        return _Guided(Placement(placed, score_s), score_s + mean_s)

    orders = (draws.shuffled(range(len(edge_s))) for _ in range(POPULATION))
    population = sorted((guided(_cut(peers, sizes)) for peers in orders), key=_guide)
    best = min((each.placement for each in population), key=_rank)
    for _ in range(children):
        one, other = draws.one_of(population), draws.one_of(population)
        child = guided(_crossed(one.placement.stages, other.placement.stages, draws))
        for _ in range(_SWAPS):
            swapped = guided(_swapped(child.placement.stages, draws))
            child = min(child, swapped, key=_guide)
            best = min(best, child.placement, key=_rank)
        if _guide(child) < _guide(population[-1]) and child not in population:
            population = sorted([*population[:-1], child], key=_guide)
    return best


@dataclass(frozen=True)
class _Guided:
    """Args: guide_s: the lower, the longer it survives; falls with each better placed replica."""

    placement: Placement
    guide_s: float


def _rank(placement: Placement) -> tuple[float, Groups]:
    return placement.score_s, placement.stages


def _guide(guided: _Guided) -> tuple[float, Groups]:
    return guided.guide_s, guided.placement.stages


class PlacementScore:
    """Scores partitions; groups and pairs of groups that were met before are not computed again.

    Args:
        edge_s, exchange_s: as in `place`.
    """

    def __init__(self, edge_s: Floats, exchange_s: Floats) -> None:
        self._edges: list[list[float]] = ((edge_s + edge_s.T) / 2).tolist()
        self._exchanges: list[list[float]] = ((exchange_s + exchange_s.T) / 2).tolist()
        self._within: dict[tuple[int, ...], _Cost] = {}
        self._between: dict[tuple[tuple[int, ...], tuple[int, ...]], _Cost] = {}

    def of(self, groups: Groups) -> _Cost:
        """(the score, the same sum over means), with the stages in the order given."""
        hops = [self._step(groups[a], groups[b]) for a, b in pairwise([*range(len(groups)), 0])]
        exchanges = [self._exchange(group) for group in groups]
        score_s = max(most_s for most_s, _ in exchanges) + 2 * sum(most_s for most_s, _ in hops)
        mean_s = sum(mean_s for _, mean_s in exchanges) + 2 * sum(mean_s for _, mean_s in hops)
        return score_s, mean_s

    def toured(self, groups: Groups) -> Groups:
        """The same partition with its stages in the order of a short tour."""
        steps = [[self._step(one, other)[0] for other in groups] for one in groups]
        return tuple(groups[index] for index in short_tour(steps))

    def _exchange(self, group: tuple[int, ...]) -> _Cost:
        """(slowest, mean) inside a stage."""
        if group not in self._within:
            times_s = [self._exchanges[one][other] for one in group for other in group]
            self._within[group] = max(times_s), sum(times_s) / len(times_s)
        return self._within[group]

    def _step(self, one: tuple[int, ...], other: tuple[int, ...]) -> _Cost:
        """(slowest of the best matching, mean of each replica's nearest) between two stages."""
        if one == other:
            return 0.0, 0.0
        key = (min(one, other), max(one, other))
        if key not in self._between:
            costs = [[self._edges[peer][there] for there in key[1]] for peer in key[0]]
            nearest = [*map(min, costs), *map(min, zip(*costs, strict=True))]
            self._between[key] = bottleneck(costs), sum(nearest) / len(nearest)
        return self._between[key]


def short_tour(steps: Sequence[Sequence[float]]) -> list[int]:
    """A short closed tour from 0: nearest neighbour, then reversals while they help (2-opt)."""
    tour, left = [0], set(range(1, len(steps)))
    while left:
        nearest = min(left, key=lambda there: (steps[tour[-1]][there], there))
        tour.append(nearest)
        left.remove(nearest)
    improved = True
    while improved:
        improved = False
        for first in range(1, len(tour) - 1):
            for last in range(first + 1, len(tour)):
                before, after = tour[first - 1], tour[(last + 1) % len(tour)]
                saved = steps[before][tour[first]] + steps[tour[last]][after]
                if saved > steps[before][tour[last]] + steps[tour[first]][after] + 1e-12:
                    tour[first : last + 1] = tour[first : last + 1][::-1]
                    improved = True
    return tour


def _cut(peers: Sequence[int], sizes: Sequence[int]) -> Groups:
    groups, begin = [], 0
    for size in sizes:
        groups.append(tuple(sorted(peers[begin : begin + size])))
        begin += size
    return tuple(groups)


def _crossed(one: Groups, other: Groups, draws: Draws) -> Groups:
    """Some groups of the one; the rest of the peers in the order of the other."""
    kept = [draws.below(2) == 0 for _ in one]
    taken = {peer for group, keep in zip(one, kept, strict=True) if keep for peer in group}
    rest = iter([peer for group in other for peer in group if peer not in taken])
    return tuple(
        group if keep else tuple(sorted(next(rest) for _ in group))
        for group, keep in zip(one, kept, strict=True)
    )


def _swapped(groups: Groups, draws: Draws) -> Groups:
    """Two peers of two groups change places."""
    if len(groups) == 1:
        return groups
    one = draws.below(len(groups))
    other = (one + 1 + draws.below(len(groups) - 1)) % len(groups)
    mine, theirs = draws.one_of(groups[one]), draws.one_of(groups[other])
    changed = list(groups)
    changed[one] = tuple(sorted({*groups[one], theirs} - {mine}))
    changed[other] = tuple(sorted({*groups[other], mine} - {theirs}))
    return tuple(changed)


def bottleneck(costs: Sequence[Sequence[float]]) -> float:
    """The least t such that links of at most t match every replica of the smaller stage.

    Args:
        costs: a row for each replica of one stage, a column for each of the other.
    """
    if len(costs) > len(costs[0]):
        costs = list(zip(*costs, strict=True))
    values = sorted({cost for row in costs for cost in row})
    # Less leaves a row without a column, and little more is enough as a rule.
    low, high, step = bisect_left(values, max(map(min, costs))), len(values) - 1, 0
    while low < high:
        middle = low + min(step, (high - low) // 2)
        if _matches_all([_within(row, values[middle]) for row in costs]):
            high = middle
        else:
            low = middle + 1
        step = 2 * step + 1
    return values[low]


def _within(row: Sequence[float], most: float) -> int:
    """The columns that a row may be matched with, as bits."""
    return sum(1 << column for column, cost in enumerate(row) if cost <= most)


def _matches_all(allowed: Sequence[int]) -> bool:
    """Whether each row finds a column of its own (Kuhn's augmenting paths)."""
    row_of: dict[int, int] = {}

    def place(row: int, tried: list[int]) -> bool:
        while free := allowed[row] & ~tried[0]:
            bit = free & -free
            tried[0] |= bit
            if bit not in row_of or place(row_of[bit], tried):
                row_of[bit] = row
                return True
        return False

    return all(place(row, [0]) for row in range(len(allowed)))
