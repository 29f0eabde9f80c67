"""Seeded choices that are the same on every machine and Python version."""

from collections.abc import Sequence
from random import Random
from typing import TypeVar

T = TypeVar("T")


class Draws:
    """Only `Random.random` is promised to stay as it is, so all else is made of it."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def below(self, bound: int) -> int:
        """A number in 0..bound-1."""
        return int(self._random.random() * bound)

    def one_of(self, values: Sequence[T]) -> T:
        return values[self.below(len(values))]

    def shuffled(self, values: Sequence[T]) -> list[T]:
        result = list(values)
        for end in range(len(result) - 1, 0, -1):
            other = self.below(end + 1)
            result[end], result[other] = result[other], result[end]
        return result
