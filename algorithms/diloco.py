"""One outer round of DiLoCo, in the order in which a peer goes through it.

    contribution   pseudo_gradient
    mean           mean_in_order: fixed, so that every reducer gets the same bits
    outer step     Nesterov momentum over pseudo-gradients, with state per fragment
    going on       merge, keep_unsent before it where replicas keep what was not sent; or carry_over
                   for a peer whose contribution was not counted

Kept progress: a replica goes on from the new anchor minus all it has learned that is not in its
contribution. The model itself then holds what error feedback (arXiv:2505.23725, arXiv:2508.15706)
needs a buffer for.

Ref: arXiv:2311.08105 (DiLoCo), arXiv:2501.18512 (merge).
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

MeanOver = Literal["all", "senders"]

_BLOCK = 1 << 16  # values of an outer step that stay in the cache of a thread
_TINY = 2.0**-126  # the smallest normal fp32

AT_HOME = -(2.0**-120)  # of an anchor's statistics: each peer has its own value, which is no number


def pseudo_gradient(anchor: Tensor, local: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`anchor - local`, fp32: the direction in which the outer step descends (arXiv:2311.08105
    algorithm 1, line 12). `out` takes the result, and may be `local`."""
    return torch.sub(anchor, local, out=out)


def mean_in_order(
    contributions: Iterable[Tensor], weights: Sequence[int] | None = None, over: MeanOver = "all"
) -> Tensor:
    """Sums left to right in fp32 and divides by the count, or by the sum of the weights; fresh, and
    the mean of blocks is the mean's blocks. Raises ValueError: there is nothing to average.

    Args:
        contributions: at least one fp32 tensor, of one shape, in the order of sorted peer ids.
        weights: 0 or more, one for each; equal ones are the same as none, bit for bit.
        over: `all` of them, or for each value its `senders`: those in which it is not 0.

    Ref: arXiv:2508.15706 (SparseLoCo) divides by the number of senders."""
    equal = weights is None or len(set(weights)) <= 1
    each_weight = itertools.repeat(1) if weights is None or equal else weights
    total: Tensor | None = None
    count: Tensor | int = 0
    for contribution, weight in zip(contributions, each_weight, strict=not equal):
        if total is None:
            total = contribution.clone() if equal else contribution * weight
        else:
            total.add_(contribution if equal else contribution * weight)
        sent = (contribution != 0).to(torch.float32).mul_(weight) if over == "senders" else weight
        count = count + sent
    if total is None:
        raise ValueError("the mean of no contributions")
    return total.div_(count if isinstance(count, int) else torch.where(count == 0, 1.0, count))


@dataclass(frozen=True)
class Nesterov:
    """SGD with Nesterov momentum as torch.optim.SGD writes it; its buffer belongs to one fragment.

    buf <- momentum * buf + g;  anchor <- anchor - lr * (g + momentum * buf)

    Where a round overlaps a whole period, g was learned without the anchor's last move. Two options
    against that, value by value; 0 for none:

    penalty p    g <- g / (1 + p |buf| / (|buf| + |g|)): the more, up to 1 + p, the more the last
                 move outweighs g. A value that did not move lately is taken as it is.
    clip c       buf <- min(c, max(-c, buf)), before it is used.

    Ref: arXiv:2311.08105 section 2 (OuterOpt), arXiv:2501.18512 algorithm 2, line 12. Penalty and
    clip are ideas of arXiv:2401.16265 (CO2); the formulas are ours."""

    lr: float
    momentum: float
    clip: float = 0.0
    penalty: float = 0.0

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ValueError(f"outer_lr is {self.lr}; it must be above 0 (0.7 is the usual value)")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"outer_momentum is {self.momentum}; it must be in 0..1, below 1")
        if not 0 <= self.clip < math.inf:
            raise ValueError(
                f"outer_momentum_clip is {self.clip}; it must be at least 0 (0: momentum is not "
                "clipped)"
            )
        if not 0 <= self.penalty < math.inf:
            raise ValueError(
                f"staleness_penalty is {self.penalty}; it must be at least 0 (0: no penalty)"
            )

    def step(self, anchor: Tensor, buffer: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """One outer step; returns fresh (anchor, buffer), all fp32 and of one shape.

        Only single multiplications and additions: a fused kernel could round differently on another
        peer, and anchors must agree bit for bit. Block by block, which fits the cache."""
        new_anchor, new_buffer = torch.empty_like(anchor), torch.empty_like(buffer)
        block = _BLOCK * torch.get_num_threads()
        for start in range(0, len(anchor), block):
            here = slice(start, start + block)
            fresh = g[here]
            if self.penalty:
                before = buffer[here].abs()
                # Where both are 0, nothing is divided.
                both = (before + fresh.abs()).clamp_(min=_TINY)
                fresh = fresh / before.div_(both).mul_(self.penalty).add_(1.0)
            moved = (buffer[here] * self.momentum).add_(fresh)
            if self.clip:
                moved.clamp_(-self.clip, self.clip)
            direction = (moved * self.momentum).add_(fresh)
            torch.sub(anchor[here], direction.mul_(self.lr), out=new_anchor[here])
            new_buffer[here] = moved
        return new_anchor, new_buffer


def take_mean(
    stepped: tuple[Tensor, Tensor], anchor: Tensor, g: Tensor, ranges: Iterable[tuple[int, int]]
) -> tuple[Tensor, Tensor]:
    """Writes the mean of the local values into fresh (anchor, momentum), in the ranges of running
    statistics; what is `AT_HOME` stays so. Args: anchor: that `g`, the mean pseudo-gradient, is
    taken from; of pairs the mean of their anchors."""
    new, momentum = stepped
    for start, stop in ranges:
        here = anchor[start:stop]
        new[start:stop] = torch.where(here == AT_HOME, here, here - g[start:stop])
        momentum[start:stop] = 0
    return stepped


def take_integers(values: Tensor, given: Tensor, exact: int) -> Tensor:
    """`values`, which are written into, with the last `exact` of those that are given."""
    if exact:
        values[-exact:] = given[-exact:]
    return values


def go_on_with_integers(
    merged: Tensor, local: Tensor, old_anchor: Tensor, g: Tensor, anchor: Tensor, exact: int
) -> Tensor:
    """`merged`, written into, with the integers to go on with after a round: the anchor's; or, if
    the anchor has taken those that this peer has contributed in `g`, its own as they are by now."""
    if not exact:
        return merged
    last = slice(-exact, None)
    own = torch.equal(old_anchor[last] - g[last], anchor[last])
    return take_integers(merged, local if own else anchor, exact)


def merge(local: Tensor, anchor: Tensor, alpha: float) -> Tensor:
    """alpha * local + (1 - alpha) * anchor, fresh; for a peer that contributed to the round
    (arXiv:2501.18512 eq. 3). With alpha = 0 the steps taken during the overlap are discarded."""
    return anchor.clone() if alpha == 0 else (local * alpha).add_(anchor * (1 - alpha))


def keep_unsent(
    local: Tensor, start: Tensor, new_anchor: Tensor, g: Tensor, error: Tensor
) -> Tensor:
    """new_anchor - unsent, fresh; for a peer whose contribution is in the round, encoded.

    Unsent is what the encoding has left out and what the steps since have learned. All that the
    replica has learned since its start is start - local, and s = g - error of it has been sent:

        unsent = (start - local) - s = error + ((start - local) - g)

    Without overlap local has not moved and unsent is error, bit for bit: DiLoCo, by an exact codec.

    Args:
        local: the parameters now; g: the pseudo-gradient when it was taken.
        start: what g counts from: the old anchor, or with pairs the mean of the group's.
        error: what the encoding has left out, g - s. Pairs send a momentum with g, and leave out
            of both.

    Ref: the update is ours; arXiv:1901.09847 keeps the same in a buffer instead."""
    since = (start - local).sub_(g)
    return new_anchor - since.add_(error)


def carry_over(local: Tensor, old_anchor: Tensor, new_anchor: Tensor) -> Tensor:
    """local + (new_anchor - old_anchor), fresh; for a peer whose contribution was not in the round.
    It moves with the anchor and keeps its own progress: the next pseudo-gradient is the old one."""
    return local + (new_anchor - old_anchor)
