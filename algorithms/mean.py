"""The mean of contributions in a fixed order, so that every reducer gets the same bits."""

from collections.abc import Iterable

from torch import Tensor


def mean_in_order(contributions: Iterable[Tensor]) -> Tensor:
    """Sums left to right in fp32 and divides by the count.

    Args:
        contributions: at least one fp32 tensor, of one shape, in the order of sorted peer ids.

    Returns:
        A fresh tensor. The operation is elementwise, so the mean of blocks is the mean's blocks.

    Raises:
        ValueError: there is nothing to average.
    """
    iterator = iter(contributions)
    first = next(iterator, None)
    if first is None:
        raise ValueError("the mean of no contributions")
    total, count = first.clone(), 1
    for contribution in iterator:
        total.add_(contribution)
        count += 1
    return total.div_(count)
