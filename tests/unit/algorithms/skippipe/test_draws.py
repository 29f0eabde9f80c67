"""Draws are the same everywhere: peers that draw differently would plan different routes."""

from hypothesis import given
from hypothesis import strategies as st

from algorithms.skippipe.draws import Draws


def test_draws_are_the_same_on_every_machine_and_version() -> None:
    draws = Draws(7)
    assert [draws.below(100) for _ in range(5)] == [32, 15, 65, 7, 53]
    assert draws.shuffled(range(6)) == [1, 3, 4, 5, 0, 2]


@given(st.integers(0, 2**64), st.lists(st.integers(), min_size=1, max_size=20))
def test_a_shuffle_keeps_all_and_a_choice_is_one_of_them(seed: int, values: list[int]) -> None:
    draws = Draws(seed)
    assert sorted(draws.shuffled(values)) == sorted(values)
    assert draws.one_of(values) in values
    assert all(0 <= draws.below(3) < 3 for _ in range(20))
