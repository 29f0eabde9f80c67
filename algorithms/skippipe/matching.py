"""Bottleneck bipartite matching: the slowest of the links that join two stages' replicas."""

from bisect import bisect_left
from collections.abc import Sequence


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
