"""What comes ahead of a round in a small group, told to the train side: once, before the round."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from worker.exchange.context import Context, Tasks
from worker.exchange.table import ANCHOR, Table
from worker.mailbox import Ahead

if TYPE_CHECKING:
    from torch import Tensor

_QUIET_S = 0.5


class HeadStarts:
    """io thread only.

    Args:
        context: run, plan, clock.
        tasks: where averaging runs.
        mean: that of the group's anchors, which are all on the table.
        tell: takes the message for the train side.
    """

    def __init__(
        self,
        context: Context,
        tasks: Tasks,
        mean: Callable[[Table], Awaitable["Tensor"]],
        tell: Callable[[Ahead], None],
    ) -> None:
        self._context, self._tasks, self._mean, self._tell = context, tasks, mean, tell
        self._met: dict[int, tuple[str, ...]] = {}  # by fragment, the group of the last round

    def laid(self, table: Table) -> None:
        """A table for a round to come. Who sits it out waits for nobody, and who has met the same
        group in the last one has its anchor already."""
        table.laid = self._context.clock()
        if len(table.group) == 1 or self._met.get(table.fragment) == table.group:
            self._say(table, None)

    def ended(self, table: Table) -> None:
        """A round is over."""
        self._met[table.fragment] = table.group if table.succeeded else ()

    def came(self, table: Table) -> None:
        """A partner's anchor is there, and valid."""
        early = self._context.plan.shared_momentum and not table.told and table.meeting is None
        if early and table.holds(ANCHOR, self._context.me):
            self._tasks.spawn(self._average(table))

    def look(self, table: Table) -> None:
        """Time passes: a partner of whom nothing comes is not waited for."""
        if self._context.clock() - max(table.laid, table.heard) > _QUIET_S:
            self._say(table, None)

    async def _average(self, table: Table) -> None:
        self._say(table, await self._mean(table))

    def _say(self, table: Table, mean_anchor: "Tensor | None") -> None:
        if self._context.plan.shared_momentum and not table.told and table.meeting is None:
            self._tell(Ahead(table.fragment, table.round, mean_anchor))
        table.told = True
