"""What simulated peers learn: a bowl whose bottom is known, each peer with noise of its own."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

VALUES = 8
_CURVATURE = np.linspace(0.25, 1.0, VALUES)
_INNER_LR = 0.02
_NOISE = 0.5  # standard deviation of a gradient


class Quadratic:
    """f(x) = 1/2 sum_k h_k (x_k - 1)^2 of a vector of 8 values, by SGD with noisy gradients.

    Everybody begins at 0, which is as far from the optimum as the optimum is from 0.

    Args:
        peers: how many replicas.
        seed: of the noise; each peer has its own.
    """

    def __init__(self, peers: int, seed: int) -> None:
        self.local = [torch.zeros(VALUES, dtype=torch.float32, device="cpu") for _ in range(peers)]
        self._rngs = [np.random.default_rng((seed, peer)) for peer in range(peers)]
        self._moves: dict[int, tuple[Tensor, NDArray[np.float64]]] = {}

    def descend(self, peer: int, steps: int) -> None:
        """This many inner steps at once: their sum is normal, and its moments are known."""
        if steps not in self._moves:
            rate = 1 - _INNER_LR * _CURVATURE
            variance = (1 - rate ** (2 * steps)) / (1 - rate**2) * (_INNER_LR * _NOISE) ** 2
            shrink = torch.from_numpy(rate**steps).float()
            self._moves[steps] = (shrink, np.sqrt(variance))
        shrink, deviation = self._moves[steps]
        noise = self._rngs[peer].standard_normal(VALUES) * deviation
        away = (self.local[peer] - 1) * shrink
        self.local[peer] = away.add_(1).add_(torch.from_numpy(noise))


def spread(anchors: list[Tensor]) -> float:
    """Root mean square distance of the anchors from their mean, over the norm of the mean."""
    stacked = torch.stack(anchors).double()
    mean = stacked.mean(0)
    distance = (stacked - mean).square().sum(1).mean().sqrt()
    return float(distance / mean.norm()) if mean.any() else 0.0


def distance_to_optimum(anchors: list[Tensor]) -> float:
    """Distance of the anchors' mean from the optimum, over the norm of the optimum."""
    mean = torch.stack(anchors).double().mean(0)
    return float((mean - 1).norm() / VALUES**0.5)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Of one run.

    Args:
        peers: at the beginning; `unfinished` of them lived, and did not come to the end.
        sync_median_s, sync_mean_s, sync_p99_s: time of a round, from a peer's last inner step to
            its new anchor, of the rounds in which it exchanged something; None if there was none.
        idle_share: of the peers' time, spent in rounds.
        spread: root mean square distance of the live peers' anchors from their mean, over its norm.
        distance: of that mean from the optimum; 1 at the beginning.
        rounds, rounds_failed: of all peers together; `reasons` of the failed ones, most frequent
            first.
        half_applied: meetings that some of the group have applied and others not.
        bytes_per_round: sent by a peer in a round.
        virtual_s: how long the run would have taken.
        events: that were simulated.
    """

    peers: int
    sync_median_s: float | None
    sync_mean_s: float | None
    sync_p99_s: float | None
    idle_share: float
    spread: float
    distance: float
    rounds: int
    rounds_failed: int
    reasons: dict[str, int]
    half_applied: int
    bytes_per_round: float
    unfinished: int
    virtual_s: float
    events: int


def percentile(values: list[float], share: float) -> float | None:
    """The smallest of the values that so large a share of them does not exceed; None of none."""
    return sorted(values)[math.ceil(share * len(values)) - 1] if values else None
