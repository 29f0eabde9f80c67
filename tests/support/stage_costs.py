"""Costs of peers that compute alike but for their speed."""

from collections.abc import Sequence

import numpy as np

from murmuration.algorithms.skippipe.pipeline import BACKWARD_RATIO, LOSS_RATIO, Costs, Links


def costs_of(links: Links, forward_s: Sequence[float], message_bytes: float) -> Costs:
    """A backward and a loss in proportion to each peer's forward.

    Args:
        forward_s: w of each peer on its stage.
        message_bytes: of one microbatch's activations, and of their gradient.
    """
    forward = np.array(forward_s, dtype=np.float64)
    return Costs(
        delay_s=links.delay_s(),
        transfer_s=links.transfer_s(message_bytes),
        forward_s=forward,
        backward_s=BACKWARD_RATIO * forward,
        loss_s=LOSS_RATIO * forward,
    )
