"""The outer optimizer: Nesterov momentum over pseudo-gradients, with state per fragment."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Nesterov:
    """SGD with Nesterov momentum as torch.optim.SGD writes it.

    buf <- momentum * buf + g;  anchor <- anchor - lr * (g + momentum * buf)

    The buffer belongs to one fragment: one optimizer over several fragments would advance the
    momentum of those that did not exchange.

    Ref: arXiv:2311.08105 section 2 (OuterOpt), arXiv:2501.18512 algorithm 2, line 12.
    """

    lr: float
    momentum: float

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ValueError(f"outer_lr is {self.lr}; it must be above 0 (0.7 is the usual value)")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"outer_momentum is {self.momentum}; it must be in 0..1, below 1")

    def step(self, anchor: Tensor, buffer: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """One outer step; returns fresh (anchor, buffer), all fp32 and of one shape.

        Only single multiplications and additions: a fused kernel could round differently on
        another peer, and anchors must agree bit for bit.
        """
        new_buffer = (buffer * self.momentum).add_(g)
        direction = (new_buffer * self.momentum).add_(g)
        return anchor - direction.mul_(self.lr), new_buffer
