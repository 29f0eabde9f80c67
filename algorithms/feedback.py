"""Error feedback: what an encoding leaves out comes with the next one.

e <- decay * e + g; send Q(e); e <- e - Q(e).

Ref: arXiv:2505.23725 (MuLoCo) and arXiv:2508.15706 (SparseLoCo), which use a decay of 0.95.
"""

from collections.abc import Iterable

from torch import Tensor


def with_residual(g: Tensor, residual: Tensor | None, decay: float) -> Tensor:
    """What to send instead of `g`: decay * residual + g, fresh; without a residual `g` itself."""
    if residual is None:
        return g
    return (residual * decay).add_(g)


def keep_residual(
    error: Tensor,
    before: Tensor | None,
    not_counted: Iterable[tuple[int, int]],
    share: float = 1.0,
) -> Tensor:
    """The residual after a round.

    Args:
        error: what the encoding of the contribution has left out; it may be written to.
        before: the residual that went into it, None for zeros.
        not_counted: the ranges in which the contribution came to nothing. What was learned there is
            contributed again, and so is the residual as it was.
        share: how much of the error to keep, 1 - alpha: a merge leaves alpha of what the anchor has
            not got in the local parameters, and that is contributed again as it is.
    """
    kept = error if share == 1 else error * share
    for start, stop in not_counted:
        kept[start:stop] = 0.0 if before is None else before[start:stop]
    return kept
