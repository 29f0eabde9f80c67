"""The mean of contributions in a fixed order, so that every reducer gets the same bits."""

from collections.abc import Iterable, Sequence

from torch import Tensor


def mean_in_order(contributions: Iterable[Tensor], weights: Sequence[int] | None = None) -> Tensor:
    """Sums left to right in fp32 and divides by the count, or by the sum of the weights.

    Args:
        contributions: at least one fp32 tensor, of one shape, in the order of sorted peer ids.
        weights: 0 or more, one for each; equal ones are the same as none, bit for bit.

    Returns:
        A fresh tensor. The operation is elementwise, so the mean of blocks is the mean's blocks.

    Raises:
        ValueError: there is nothing to average.
    """
    if weights is not None and len(set(weights)) > 1:
        return _weighted(contributions, weights)
    iterator = iter(contributions)
    first = next(iterator, None)
    if first is None:
        raise ValueError("the mean of no contributions")
    total, count = first.clone(), 1
    for contribution in iterator:
        total.add_(contribution)
        count += 1
    return total.div_(count)


def _weighted(contributions: Iterable[Tensor], weights: Sequence[int]) -> Tensor:
    total: Tensor | None = None
    for contribution, weight in zip(contributions, weights, strict=True):
        part = contribution * weight
        total = part if total is None else total.add_(part)
    assert total is not None, "weights differ, so there are some"
    return total.div_(sum(weights))
