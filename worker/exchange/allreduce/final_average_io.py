"""The pass that ends a run in pairs, on the network: carries out what `FinalAverage` says."""

from dataclasses import replace

from worker.exchange.allreduce.contributor_io import ContributorIO
from worker.exchange.allreduce.final_average import (
    FinalAction,
    FinalAverage,
    GiveUpMean,
    LayOut,
    MeanEnded,
    PassEnded,
)
from worker.exchange.allreduce.reducer_io import ReducerIO
from worker.exchange.context import Context, Peers, Results, Tasks
from worker.exchange.types import GivenUp, RoundTick, View, ViewUpdated
from worker.training.inbox import Begin, RoundDone, RoundFailed


class FinalAverageIO:
    """This peer's part in the pass that ends a run in pairs. io thread only.

    Args:
        context: with the plan of means.
        reducer: this peer's own.
        peers: how to reach the others.
        results: takes each RoundDone and RoundFailed, one for each `begin`.
    """

    def __init__(
        self, context: Context, reducer: ReducerIO, peers: Peers, results: Results
    ) -> None:
        self._context, self._reducer, self._results = context, reducer, results
        self._contributor = ContributorIO(context, reducer, peers, self)
        self._view = View()
        self._passes: dict[int, tuple[FinalAverage, Begin]] = {}
        self._tasks = Tasks()

    async def begin(self, begin: Begin) -> None:
        """This peer has come to the end; its outcome is a result."""
        context, fragment = self._context, begin.fragment
        machine = FinalAverage(
            context.me,
            fragment,
            begin.round,
            self._view,
            context.config,
            context.clock(),
            context.round_s(fragment),
        )
        self._passes[fragment] = (machine, begin)
        self._handle(fragment, RoundTick())

    def tick(self) -> None:
        """Time passes."""
        self._contributor.tick()
        self._handle_all(RoundTick())

    def on_view(self, view: View) -> None:
        """Membership has changed."""
        self._view = view
        self._contributor.on_view(view)
        self._handle_all(ViewUpdated(view))

    def give_up(self, fragment: int, reason: str) -> None:
        """Ends the fragment's pass, if there is one, as failed."""
        self._handle(fragment, GivenUp(reason))

    def finished(self, result: RoundDone | RoundFailed) -> None:
        """A mean of the pass has ended."""
        failed = isinstance(result, RoundFailed)
        self._handle(result.fragment, MeanEnded(failed), result)

    async def close(self) -> None:
        await self._tasks.close()
        await self._contributor.close()

    # --------------------------------------------------------------------------------- inside

    def _handle_all(self, event: RoundTick | ViewUpdated) -> None:
        for fragment in list(self._passes):
            self._handle(fragment, event)

    def _handle(
        self,
        fragment: int,
        event: RoundTick | ViewUpdated | GivenUp | MeanEnded,
        result: RoundDone | RoundFailed | None = None,
    ) -> None:
        if (pass_ := self._passes.get(fragment)) is None:
            return
        machine, begin = pass_
        for action in machine.handle(event, self._context.clock()):
            self._carry_out(begin, action, result)

    def _carry_out(
        self, begin: Begin, action: FinalAction, result: RoundDone | RoundFailed | None
    ) -> None:
        match action:
            case LayOut(group):
                self._reducer.advanced(begin.fragment, begin.round, group)
                self._tasks.spawn(self._contributor.begin(replace(begin, group=group)))
            case GiveUpMean(reason):
                self._contributor.give_up(begin.fragment, reason)
            case PassEnded(reason):
                del self._passes[begin.fragment]
                failed = RoundFailed(begin.fragment, begin.round, reason, ())
                self._results.finished(result or failed)
