"""What simulated peers learn: a bowl whose bottom is known, each peer with noise of its own."""

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
        self.local = [torch.zeros(VALUES) for _ in range(peers)]
        self._rngs = [np.random.default_rng((seed, peer)) for peer in range(peers)]
        self._moves: dict[int, tuple[Tensor, NDArray[np.float64]]] = {}

    def descend(self, peer: int, steps: int) -> None:
        """So many inner steps at once: their sum is normal, and its moments are known."""
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
