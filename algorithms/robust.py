"""How much one peer can move a mean of many: contributions are held to the others' norms.

A contribution whose norm is above `limit` times the median of all counts as far as that. A peer
that is far above it again and again is in quarantine, and its contributions are left out. A mean of
two cannot tell which of them is wrong, and is taken as it is.

Ref: arXiv:2508.15706 (SparseLoCo) scales every contribution to the median norm; arXiv:1803.01498
for the trimmed mean.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from murmuration.algorithms.diloco import MeanOver, mean_in_order

Aggregation = Literal["mean", "trimmed"]
AGGREGATIONS: tuple[Aggregation, ...] = ("mean", "trimmed")

NORM_LIMIT = 3.0  # medians
_FEWEST = 3  # contributions that have a median
_FEWEST_TRIMMED = 5
NORM_SLACK = 2.0  # an encoding may enlarge a contribution's norm
_FAR = 10.0  # times the median: no honest contribution of equal work has that
_STRIKES = 3
_MOST_STRIKES = 12


def norm(values: Tensor) -> float:
    """The Euclidean norm of a contribution, any shape, before it is encoded."""
    return float(torch.linalg.vector_norm(values))


def norm_ratios(norms: Sequence[float]) -> tuple[float, ...]:
    """Each norm over their median, the lower one of an even number.

    1 for each where there are fewer than three, or where most are 0.
    """
    median = sorted(norms)[(len(norms) - 1) // 2] if norms else 0.0
    if len(norms) < _FEWEST or median == 0:
        return (1.0,) * len(norms)
    return tuple(each / median for each in norms)


def norm_factors(ratios: Iterable[float], limit: float) -> tuple[float, ...]:
    """What to multiply each contribution by, at most 1: none counts more than `limit` medians.

    Args:
        ratios: of `norm_ratios`.
        limit: in medians, at least 1; 0 takes all as they are.
    """
    return tuple(limit / ratio if 0 < limit < ratio else 1.0 for ratio in ratios)


def taken_out(factor: float) -> float:
    """The share of a contribution that a replica takes out of its parameters, where it keeps what
    no anchor has; `factor` is its factor in the mean.

    What was not counted is kept, as far as it is no more than what was. So it adds at most the
    limit to the next contribution, and a peer that is always above the limit stays in bounds.
    """
    return max(factor, 1 - factor)


class Quarantine:
    """The peers whose contributions have been far too large again and again.

    Three such rounds put a peer in; each ordinary one takes a strike back, so that a peer that was
    in for long is out after twelve.

    Args:
        kept: the medians by which a contribution may be larger, of what its replica has kept.
    """

    def __init__(self, kept: float = 0.0) -> None:
        self._far = _FAR + kept
        self._strikes: dict[str, int] = {}
        self._seen: dict[int, int] = {}
        self.peers: frozenset[str] = frozenset()

    def saw(self, fragment: int, round_: int, ratios: Mapping[str, float]) -> None:
        """Takes the norm ratios of a round, whichever of its shards they come with first."""
        if self._seen.get(fragment, -1) >= round_:
            return
        self._seen[fragment] = round_
        for peer, ratio in ratios.items():
            strikes = self._strikes.get(peer, 0) + (1 if ratio > self._far else -1)
            self._strikes[peer] = min(_MOST_STRIKES, max(0, strikes))
            if self._strikes[peer] >= _STRIKES:
                self.peers |= {peer}
            elif not self._strikes[peer]:
                del self._strikes[peer]
                self.peers -= {peer}


def aggregate(
    contributions: Iterable[Tensor],
    factors: Sequence[float],
    weights: Sequence[int] | None = None,
    *,
    over: MeanOver = "all",
    aggregation: Aggregation = "mean",
) -> Tensor:
    """The mean of a round's contributions, each times its factor.

    Args:
        contributions: at least one fp32 tensor, of one shape, in the order of sorted peer ids.
        factors: of `norm_factors`, one for each.
        weights, over: as `mean_in_order` takes them.
        aggregation: `mean`; or of five or more contributions the `trimmed` mean, which takes no
            account of weights and senders.

    Returns:
        A fresh tensor. The operation is elementwise, so the mean of blocks is the mean's blocks.

    Raises:
        ValueError: there is nothing to average.
    """
    pairs = zip(contributions, factors, strict=True)
    scaled = (each if factor == 1 else each * factor for each, factor in pairs)
    if aggregation == "trimmed" and len(factors) >= _FEWEST_TRIMMED:
        return trimmed_mean(tuple(scaled))
    return mean_in_order(scaled, weights, over)


def trimmed_mean(contributions: Sequence[Tensor]) -> Tensor:
    """The mean of each value without its largest and its smallest fifth, rounded up.

    Args:
        contributions: at least three fp32 tensors of one shape.
    """
    count = len(contributions)
    cut = -(-count // 5)
    ordered = torch.stack(tuple(contributions)).sort(dim=0).values
    return ordered[cut : count - cut].sum(dim=0).div_(count - 2 * cut)
