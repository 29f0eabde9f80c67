"""What a node is made of: the protocol of its components, and the process around them."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from worker.exchange.context import Offload
from worker.exchange.types import View
from worker.training.inbox import Begin


class Component(Protocol):
    """A part of the node. io thread only."""

    def on_view(self, view: View) -> None:
        """Membership has changed."""
        ...

    def tick(self) -> None:
        """Time passes."""
        ...

    async def close(self) -> None: ...


class Rounds(Component, Protocol):
    """This peer's own part in rounds."""

    async def begin(self, begin: Begin) -> None:
        """Starts a round; it ends with a RoundDone or RoundFailed."""
        ...

    def give_up(self, fragment: int, reason: str) -> None:
        """Ends the fragment's round on its way, if there is one, as failed."""
        ...


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The process around a node.

    Args:
        offload: where heavy work runs.
        log: takes events as plain values.
        clock: monotonic seconds.
    """

    offload: Offload
    log: Callable[[dict[str, object]], None]
    clock: Callable[[], float] = time.monotonic
