"""Eager updates: go on from a guess of the new anchor while the round is on its way.

The guess takes this peer's fresh pseudo-gradient with what the others contributed to the round
before. Only the local parameters follow it: the anchor waits for the true mean, so that anchors
agree bit for bit, and then the local parameters are corrected by the difference.

Ref: arXiv:2502.12996, which lets the outer parameters themselves follow the guess.
"""

from torch import Tensor


def others_share(mean: Tensor, own: Tensor, contributors: int) -> Tensor:
    """What the others brought into a mean: (1/M) sum over j != m of g_j."""
    return mean - own * (1 / contributors)


def eager_mean(own: Tensor, others: Tensor, contributors: int) -> Tensor:
    """The mean to expect: (1/M) [g_m(t) + sum over j != m of g_j(t - H)]."""
    return own * (1 / contributors) + others
