"""What a peer contributes to a round."""

from torch import Tensor


def pseudo_gradient(anchor: Tensor, local: Tensor) -> Tensor:
    """`anchor - local` as a fresh tensor: the direction in which the outer step descends.

    Args:
        anchor: outer parameters of a fragment, fp32.
        local: this peer's parameters after its inner steps, same shape.

    Ref: arXiv:2311.08105 algorithm 1, line 12.
    """
    return anchor - local
