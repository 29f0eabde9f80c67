"""How much callers may have under way at once: each of them, and all together."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from murmuration.worker.transport.base import Busy, Caller


class Places:
    """Places for calls or streams; one that finds none is refused. io thread only.

    Args:
        what: of what, as a refusal names it.
        share: of one caller, however many others have.
        each: of one caller, at most; without a certificate nobody can be told from others.
        total: of all callers together, asked for each time; half of them go by shares.
    """

    def __init__(self, what: str, share: int, each: int, total: Callable[[], int]) -> None:
        self._what, self._share, self._each, self._total = what, share, each, total
        self._taken: Counter[tuple[str, str]] = Counter()

    @property
    def _common(self) -> int:
        """That are taken beyond the shares of their callers."""
        return sum(max(0, taken - self._share) for taken in self._taken.values())

    @contextmanager
    def taken(self, caller: Caller) -> Iterator[None]:
        """Holds a place. Raises Busy: the caller has too many, or all of them have."""
        who, total = (caller.role, caller.name), self._total()
        if caller.role and self._taken[who] >= self._each:
            raise Busy(f"{caller.name} has {self._each} {self._what} here, and may have no more")
        if not caller.role:
            free = self._taken.total() < total
        else:
            free = self._taken[who] < self._share or self._common < total // 2
        if not free:
            taken = f"{self._taken.total()} of at most {total} {self._what}"
            raise Busy(f"no place is free here: {taken} are under way")
        self._taken[who] += 1
        try:
            yield
        finally:
            self._taken[who] -= 1
            if not self._taken[who]:
                del self._taken[who]
