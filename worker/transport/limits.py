"""How much callers may have under way at once: each of them, and all together."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from murmuration.worker.transport.base import Busy, Caller


class Places:
    """Places for calls or streams; one that finds none is refused. io thread only.

    Args:
        what: of what, as a refusal names it.
        each: of one caller; without a certificate nobody can be told from others.
        total: of all callers together, asked for each time.
    """

    def __init__(self, what: str, each: int, total: Callable[[], int]) -> None:
        self._what, self._each, self._total = what, each, total
        self._taken: Counter[tuple[str, str]] = Counter()

    @contextmanager
    def taken(self, caller: Caller) -> Iterator[None]:
        """Holds a place. Raises Busy: the caller has too many, or all of them have."""
        who, total = (caller.role, caller.name), self._total()
        if caller.role and self._taken[who] >= self._each:
            raise Busy(f"{caller.name} has {self._each} {self._what} here, and may have no more")
        if self._taken.total() >= total:
            raise Busy(f"{total} {self._what} are under way here, and there may be no more")
        self._taken[who] += 1
        try:
            yield
        finally:
            self._taken[who] -= 1
            if not self._taken[who]:
                del self._taken[who]
