"""The pass that ends a run in pairs: one exact mean over everyone's anchors.

Rounds over all agree from one to the next on the peers that take part; pairs have nothing of the
kind. So each peer waits until everyone has come to the end of the schedule, which their digests
tell, or a grace is over, and lays the pass out over those that have. Where others have seen other
peers, all try again. A peer that was too late takes over the state of those that were in it, as any
peer does whose round has failed (`murmuration.worker.catchup.bootstrap`).
"""

import math
from dataclasses import dataclass, replace

from murmuration.protos.events import new_event
from murmuration.worker.background import Tasks
from murmuration.worker.exchange.allreduce.contributor import Contributor
from murmuration.worker.exchange.allreduce.reducer import Reducer
from murmuration.worker.exchange.round_context import Context, Peers, Results
from murmuration.worker.exchange.view import View
from murmuration.worker.membership import Phase
from murmuration.worker.training.mailbox import Begin, RoundDone, RoundFailed

_RETRY_S = 0.5


@dataclass(eq=False)
class _Pass:
    begin: Begin
    patient_until: float
    deadline: float
    running: bool = False  # a mean of it is on its way
    retry_at: float = -math.inf


class FinalAverage:
    """This peer's part in the pass that ends a run in pairs. io thread only. Args: context: with
    the plan of means, whose grace says how long others are waited for."""

    def __init__(self, context: Context, reducer: Reducer, peers: Peers, results: Results) -> None:
        self._context, self._reducer, self._results = context, reducer, results
        self._contributor, self._view = Contributor(context, reducer, peers, self), View()
        self._passes: dict[int, _Pass] = {}
        self._tasks = Tasks()

    async def begin(self, begin: Begin) -> None:
        """This peer has come to the end; its outcome is a result."""
        patient_until = self._context.clock() + self._context.config.grace_s
        deadline = patient_until + self._context.round_s(begin.fragment)
        self._passes[begin.fragment] = pass_ = _Pass(begin, patient_until, deadline)
        self._advance(pass_)

    def tick(self) -> None:
        self._contributor.tick()
        for pass_ in list(self._passes.values()):
            self._advance(pass_)

    def on_view(self, view: View) -> None:
        self._view = view
        self._contributor.on_view(view)
        for pass_ in list(self._passes.values()):
            self._advance(pass_)

    def give_up(self, fragment: int, reason: str) -> None:
        """Ends the fragment's pass, if there is one, as failed."""
        if pass_ := self._passes.get(fragment):
            pass_.deadline = -math.inf
            if pass_.running:
                self._contributor.give_up(fragment, reason)
            else:
                self._fail(pass_, reason)

    def finished(self, result: RoundDone | RoundFailed) -> None:
        now, pass_ = self._context.clock(), self._passes[result.fragment]
        if isinstance(result, RoundDone) or now >= pass_.deadline:
            del self._passes[result.fragment]
            here, given = len(pass_.begin.group), getattr(result, "contributors", 0)
            if 2 * given <= here > 1:
                text = f"the mean that ends the run has {given} of {here} peers: models differ"
                self._context.log(new_event("warning", text=text))
            self._results.finished(result)
        else:
            pass_.running, pass_.retry_at = False, now + _RETRY_S

    async def close(self) -> None:
        await self._tasks.close()
        await self._contributor.close()

    def _advance(self, pass_: _Pass) -> None:
        now, begin = self._context.clock(), pass_.begin
        if pass_.running or now < pass_.retry_at:
            return
        live = [member for member in self._view.members.values() if member.live]
        known = (member for member in live if begin.fragment < len(member.digests))
        at = {member.peer: member.digests[begin.fragment].version for member in known}
        if any(version > begin.round for version in at.values()):
            self._fail(pass_, "the others have agreed without this peer")
            return
        phases = (Phase.READY, Phase.TRAINING, Phase.LEAVING)
        running = [member.peer for member in live if member.phase in phases]
        here = {peer for peer in running if at.get(peer) == begin.round}
        if len(here) < len(running) and now < pass_.patient_until:
            return
        pass_.running = True
        group = tuple(sorted({*here, self._context.me}))
        self._reducer.advanced(begin.fragment, begin.round, group)
        pass_.begin = replace(begin, group=group)
        self._tasks.spawn(self._contributor.begin(pass_.begin))

    def _fail(self, pass_: _Pass, reason: str) -> None:
        del self._passes[pass_.begin.fragment]
        self._results.finished(RoundFailed(pass_.begin.fragment, pass_.begin.round, reason, ()))
