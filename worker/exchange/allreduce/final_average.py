"""The pass that ends a run in pairs: one exact mean over everyone's anchors.

Rounds over all agree from one to the next on who takes part in it; pairs have nothing of the kind.
So each peer waits until everyone has come to the end of the schedule, which their digests tell, or
a grace is over, and lays the pass out over those who have. Where others have seen other peers, all
try again. Whoever was too late for it takes over the state of those who were in it, as any peer
does whose round has failed (`worker.catchup.bootstrap`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from worker.exchange.allreduce.contributor_io import Contributor
from worker.exchange.allreduce.reducer_io import Reducer
from worker.exchange.context import Context, Tasks
from worker.exchange.types import View
from worker.membership import Member, Phase
from worker.training.inbox import Begin, RoundDone, RoundFailed
from worker.transport import Transport

_RETRY_S = 0.5


@dataclass
class _Pass:
    """Of one fragment. `patient_until` and `deadline` are monotonic times (s)."""

    begin: Begin
    patient_until: float
    deadline: float
    running: bool = False
    retry_at: float = -math.inf


class FinalAverage:
    """This peer's part in the last pass, at most one per fragment. io thread only.

    Args:
        context: with the plan of means.
        reducer: this peer's own.
        transport, address_of: how to reach a peer.
        finished: takes each RoundDone and RoundFailed, one for each `begin`.
        doubt: takes a peer whose stream broke.
    """

    def __init__(
        self,
        context: Context,
        reducer: Reducer,
        transport: Transport,
        address_of: Callable[[str], str | None],
        finished: Callable[[RoundDone | RoundFailed], None],
        doubt: Callable[[str], None],
    ) -> None:
        self._context, self._reducer, self._finished = context, reducer, finished
        self._contributor = Contributor(context, reducer, transport, address_of, self._ended, doubt)
        self._view = View()
        self._passes: dict[int, _Pass] = {}
        self._tasks = Tasks()

    async def begin(self, begin: Begin) -> None:
        """This peer has come to the end; it ends with `finished`."""
        patient_until = self._context.clock() + self._context.config.grace_s
        deadline = patient_until + self._context.round_s(begin.fragment)
        self._passes[begin.fragment] = _Pass(begin, patient_until, deadline)
        self._advance()

    def tick(self) -> None:
        """Time passes."""
        self._contributor.tick()
        self._advance()

    def on_view(self, view: View) -> None:
        """Membership has changed."""
        self._view = view
        self._contributor.on_view(view)
        self._advance()

    def give_up(self, fragment: int, reason: str) -> None:
        """Ends the fragment's pass, if there is one, as failed."""
        if (pass_ := self._passes.get(fragment)) is not None:
            pass_.deadline = -math.inf
            self._contributor.give_up(fragment, reason)
            if not pass_.running:
                self._fail(pass_, reason)

    async def close(self) -> None:
        await self._tasks.close()
        await self._contributor.close()

    # --------------------------------------------------------------------------------- inside

    def _advance(self) -> None:
        """Lays out what is due."""
        now = self._context.clock()
        for pass_ in list(self._passes.values()):
            if pass_.running or now < pass_.retry_at:
                continue
            fragment, round_ = pass_.begin.fragment, pass_.begin.round
            live = [member for member in self._view.members.values() if member.live]
            if any(_version(member, fragment) > round_ for member in live):
                self._fail(pass_, "the others have agreed without this peer")
                continue
            running = [member for member in live if member.phase in (Phase.READY, Phase.TRAINING)]
            here = {member.peer for member in running if _version(member, fragment) == round_}
            if len(here) == len(running) or now >= pass_.patient_until:
                group = tuple(sorted({*here, self._context.me}))
                pass_.running = True
                self._reducer.advanced(fragment, round_, group)
                self._tasks.spawn(self._contributor.begin(replace(pass_.begin, group=group)))

    def _fail(self, pass_: _Pass, reason: str) -> None:
        del self._passes[pass_.begin.fragment]
        self._finished(RoundFailed(pass_.begin.fragment, pass_.begin.round, reason, ()))

    def _ended(self, result: RoundDone | RoundFailed) -> None:
        pass_, now = self._passes[result.fragment], self._context.clock()
        if isinstance(result, RoundFailed) and now < pass_.deadline:
            pass_.running, pass_.retry_at = False, now + _RETRY_S
            return
        del self._passes[result.fragment]
        self._finished(result)


def _version(member: Member, fragment: int) -> int:
    """Of the peer's state; -1 as long as it has none."""
    return member.digests[fragment].version if fragment < len(member.digests) else -1
