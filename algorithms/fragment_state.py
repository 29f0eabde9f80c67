"""The committed state of one fragment on one peer."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class FragmentState:
    """Tensors are never written again.

    Args:
        version: counts the rounds applied, so it names the next one.
        contributors: of the latest round; group: lays out the next.
        anchor, momentum: 1-D fp32; the momentum is empty where the plan has no outer momentum.
        hash: of anchor, momentum and group, as peers compare them.
    """

    version: int
    contributors: int
    group: tuple[str, ...]
    anchor: Tensor
    momentum: Tensor
    hash: int
