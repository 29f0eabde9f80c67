"""The bowl: many steps at once are as many steps, and its measures are what they say."""

import numpy as np
import pytest
import torch

from murmuration.worker.simulation.task import VALUES, Quadratic, distance_to_optimum, spread


def test_steps_at_once_have_the_moments_of_steps_one_by_one() -> None:
    peers, steps = 2000, 12
    at_once, one_by_one = Quadratic(peers, 1), Quadratic(peers, 2)
    for peer in range(peers):
        at_once.descend(peer, steps)
        for _ in range(steps):
            one_by_one.descend(peer, 1)
    left, right = (torch.stack(each.local).double().numpy() for each in (at_once, one_by_one))
    error = np.sqrt(left.var(0) / peers)
    assert np.all(np.abs(left.mean(0) - right.mean(0)) < 6 * error)
    assert left.std(0) == pytest.approx(right.std(0), rel=0.1)


def test_replicas_come_near_the_optimum_and_each_has_noise_of_its_own() -> None:
    task = Quadratic(50, 3)
    assert distance_to_optimum(task.local) == 1
    for peer in range(50):
        task.descend(peer, 2000)
    assert distance_to_optimum(task.local) < 0.05
    assert spread(task.local) > 0.02


def test_spread_is_relative_and_root_mean_square() -> None:
    def filled(value: float) -> torch.Tensor:
        return torch.full((VALUES,), value)

    assert spread([filled(2.0)] * 3) == 0
    assert spread([filled(1.0), filled(3.0)]) == pytest.approx(0.5)
    assert spread([filled(1.0), filled(1.0), filled(4.0)]) == pytest.approx(2**0.5 / 2)
