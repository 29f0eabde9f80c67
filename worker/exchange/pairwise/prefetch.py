"""What comes ahead of a round in a small group, told to the train side before the round."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from worker.exchange.context import Context, Tasks
from worker.exchange.pairwise.buffer import ANCHOR, PairBuffer
from worker.exchange.pairwise.round import ArrivalSkew
from worker.training.inbox import PrefetchedAnchor

if TYPE_CHECKING:
    from torch import Tensor

_QUIET_S = 1.0  # several delays of a long link pass before the first byte


class AnchorPrefetch:
    """The mean of the group's anchors is told as soon as it is known. Where the train side waits
    for it, which it does in plans without overlap, it is told as well when it may go on without: a
    mean that comes later is told all the same. io thread only.

    Args:
        context: run, plan, clock.
        tasks: where averaging runs.
        lead: how long partners may still be exchanging that this peer has not exchanged with.
        mean: that of the group's anchors, which are all on the table.
        tell: takes the message for the train side.
    """

    def __init__(
        self,
        context: Context,
        tasks: Tasks,
        lead: ArrivalSkew,
        mean: Callable[[PairBuffer], Awaitable["Tensor"]],
        tell: Callable[[PrefetchedAnchor], None],
    ) -> None:
        self._context, self._tasks, self._lead = context, tasks, lead
        self._mean, self._tell = mean, tell
        self._met: dict[int, tuple[str, ...]] = {}  # by fragment, with whom the last round was held

    def laid(self, table: PairBuffer, members: int) -> None:
        """A table for a round to come, in a swarm of so many. Who sits it out waits for nobody, and
        where all are one group they have one anchor."""
        table.laid = self._context.clock()
        one = len(table.group) == members and self._met.get(table.fragment) == table.group
        if len(table.group) == 1 or one:
            self._go_without(table)

    def missing(self, fragment: int, round_: int) -> None:
        """There is no table for a round to come: nobody may wait for what is not to be."""
        if self._waited_for:
            self._tell(PrefetchedAnchor(fragment, round_, None))

    def ended(self, table: PairBuffer) -> None:
        """A round is over."""
        self._met[table.fragment] = table.group if table.succeeded else ()

    def came(self, table: PairBuffer) -> None:
        """A partner's anchor is there, and valid."""
        early = self._context.plan.shared_momentum and not table.told and table.meeting is None
        if early and table.holds(ANCHOR, self._context.me):
            table.told = True
            self._tasks.spawn(self._average(table))

    def look(self, table: PairBuffer) -> None:
        """Time passes: a partner of whom nothing comes is not waited for, and one of whom little
        comes not for ever."""
        context, now = self._context, self._context.clock()
        quiet_s, slowest_s = _QUIET_S, context.config.transfer_s(len(table.own[ANCHOR].raw))
        if len(self._met.get(table.fragment, table.group)) < 2:  # the others are exchanging
            quiet_s += self._lead.lead_s(context.round_bytes(table.fragment))
        if now - max(table.laid, table.heard) > quiet_s or now - table.laid > quiet_s + slowest_s:
            self._go_without(table)

    async def _average(self, table: PairBuffer) -> None:
        mean_anchor = await self._mean(table)
        if table.meeting is None:
            self._tell(PrefetchedAnchor(table.fragment, table.round, mean_anchor))

    def _go_without(self, table: PairBuffer) -> None:
        if table.meeting is None and not (table.told or table.let_go):
            table.let_go = True
            self.missing(table.fragment, table.round)

    @property
    def _waited_for(self) -> bool:
        """Whether the train side waits for anchors."""
        plan = self._context.plan
        return plan.shared_momentum and plan.overlap_steps == 0
