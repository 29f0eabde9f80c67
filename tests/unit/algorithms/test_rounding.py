"""Seeds of stochastic rounding: one for each thing that is rounded, the same everywhere."""

from itertools import product

from algorithms.diloco import contribution_seed, reduction_seed


def test_everything_that_is_rounded_has_a_seed_of_its_own() -> None:
    places = list(product(range(3), range(4), (0, 64, 4096)))
    seeds = [contribution_seed(peer, *at) for peer in ("a", "b", "a/1") for at in places]
    seeds += [reduction_seed(*at) for at in places]
    assert len(set(seeds)) == len(seeds)


def test_seeds_are_of_63_bits() -> None:
    seeds = [contribution_seed("w", 0, round_, 0) for round_ in range(200)]
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds).bit_length() == 63


def test_seeds_are_the_same_on_every_machine_and_version() -> None:
    """Two versions that disagree here would reduce to different bytes."""
    assert contribution_seed("w0", 1, 2, 64) == 8909972375091197430
    assert reduction_seed(1, 2, 64) == 5116964113473213834
