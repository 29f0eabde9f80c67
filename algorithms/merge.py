"""How a peer goes on from a new anchor without dropping what it learned meanwhile."""

from torch import Tensor


def merge(local: Tensor, anchor: Tensor, alpha: float) -> Tensor:
    """alpha * local + (1 - alpha) * anchor, fresh; for a peer that contributed to the round.

    alpha = 0 restarts from the anchor and discards the steps taken during the overlap; alpha = 1
    would be no communication.

    Ref: arXiv:2501.18512 eq. 3.
    """
    if alpha == 0:
        return anchor.clone()
    return (local * alpha).add_(anchor * (1 - alpha))


def carry_over(local: Tensor, old_anchor: Tensor, new_anchor: Tensor) -> Tensor:
    """local + (new_anchor - old_anchor), fresh; for a peer whose contribution was not in the round.

    Moves the peer with the anchor and keeps its own progress against it: the next pseudo-gradient
    `new_anchor - local` is the old `old_anchor - local`, so nothing learned is dropped.
    """
    return local + (new_anchor - old_anchor)
