import pytest
import torch
from torch import Tensor

from algorithms.codecs.blocks import fill


def noise(seed: int, start: int, count: int, bits: int = 16) -> Tensor:
    words = torch.empty(count, dtype=torch.int32)
    fill(words, seed, start, bits, torch.empty_like(words))
    return words


def test_the_noise_never_changes() -> None:
    assert noise(1, 0, 4, 23).tolist() == [4290693, 2960830, 1540899, 7095695]


def test_a_value_depends_on_seed_and_place_only() -> None:
    assert torch.equal(noise(5, 0, 1000)[300:], noise(5, 300, 700))
    assert torch.equal(noise(5, 2**32 - 2, 4)[2:], noise(5, 0, 2))
    assert torch.equal(noise(5, 2**31 - 2, 4)[2:], noise(5, 2**31, 2))


@pytest.mark.parametrize("bits", [1, 15, 23, 31])
def test_it_is_uniform(bits: int) -> None:
    words = noise(7, 0, 100_000, bits).to(torch.float64) / 2.0**bits
    assert words.min() >= 0
    assert words.max() < 1
    assert abs(words.mean() - (0.5 - 0.5 / 2**bits)) < 0.005
    for bit in range(bits):
        assert abs((noise(7, 0, 100_000, bits) >> bit & 1).float().mean() - 0.5) < 0.01


@pytest.mark.parametrize("other", ["next value", "next seed", "far seed", "seed 2^32 on"])
def test_it_is_not_correlated(other: str) -> None:
    first = noise(7, 0, 100_000).to(torch.float64)
    second = {
        "next value": noise(7, 1, 100_000),
        "next seed": noise(8, 0, 100_000),
        "far seed": noise(-(2**40), 0, 100_000),
        "seed 2^32 on": noise(7 + 2**32, 0, 100_000),
    }[other].to(torch.float64)
    assert abs(torch.corrcoef(torch.stack((first, second)))[0, 1]) < 0.015


def test_no_two_seeds_run_through_one_sequence() -> None:
    values = [set(noise(seed, 0, 20_000, 31).tolist()) for seed in range(4)]
    shared = [len(values[a] & values[b]) for a in range(4) for b in range(a)]
    assert max(shared) < 10  # 0.2 by chance
