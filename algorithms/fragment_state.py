"""One fragment on one peer: its committed state, what is contributed of it, and what comes back.

    contribute ──► in flight ──► apply      a round that closed
                             ├─► abandon    one that came to nothing
                             └─► release    one that another's state may hold: then take_back, adopt

Decides what becomes of the local parameters when a round ends, whichever way it does. Tensors that
are known outside are not written.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from murmuration.algorithms import counted as counting, diloco
from murmuration.algorithms.codecs import codec_by_name
from murmuration.algorithms.fragments import Ranges, complement, union
from murmuration.algorithms.noloco import relative_distance
from murmuration.algorithms.plan import Plan

_MOST_APART = 4  # rounds of a minority whose contributions are remembered


@dataclass(frozen=True)
class FragmentState:
    """The committed state; its tensors are never written again.

    Args:
        version: counts the rounds applied, so it names the next one.
        contributors: of the latest round; group: lays out the next.
        anchor, momentum: 1-D fp32; the momentum is empty where the plan has no outer momentum.
        hash: of anchor, momentum and group; history: whose contributions its rounds have counted.
        told_until: of rounds before this one another peer has told it, with the state.
    """

    version: int
    contributors: int
    group: tuple[str, ...]
    anchor: Tensor
    momentum: Tensor
    hash: int
    history: counting.History = ()
    told_until: int = 0


@dataclass(frozen=True)
class Contribution:
    """This peer's part in a round, on its way.

    Args:
        step: the inner step after which it was taken.
        g: the pseudo-gradient, or the gradient; values: what travels, `g` or with a momentum.
        work_steps: the inner steps that it stands for.
        everyone: it is for the final average of a run.
        again: it is what an earlier try of the round has sent. What was learned since comes later.
        ranges: of a try that came to nothing here, those whose reduction is known to have it: what
            counts there must not be contributed again. None before it has failed.
        error: what the encoding of such a try has left out, where replicas keep it."""

    round: int
    step: int
    g: Tensor
    values: Tensor
    work_steps: int = 1
    everyone: bool = False
    again: bool = False
    ranges: Ranges | None = None
    error: Tensor | None = None

    def plain(self) -> dict[str, Any]:
        """As numbers, lists and tensors, for a checkpoint."""
        found = {"round": self.round, "step": self.step, "work_steps": self.work_steps, "g": self.g}
        found |= {} if self.values is self.g else {"values": self.values}
        found |= {} if self.ranges is None else {"ranges": [list(each) for each in self.ranges]}
        return found | ({} if self.error is None else {"error": self.error})

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "Contribution":
        ranges = plain.get("ranges")
        known = None if ranges is None else tuple((start, stop) for start, stop in ranges)
        return cls(**{"values": plain["g"], **plain, "ranges": known})


@dataclass(frozen=True)
class RoundResult:
    """The result of a round that closed.

    Args:
        mean: of the contributions, which everyone applies.
        next_group: lays out the next round; empty where that one's is drawn.
        missed: the ranges in which this peer's contribution is not counted.
        error: what the encoding of the contribution has left out, where replicas keep it.
        mean_anchor: of the group, in a plan of pairs.
        parts: the contributors, by range; empty where that is not known.
        sent: gives the contribution as others have decoded it, where the plan keeps the rest."""

    round: int
    mean: Tensor
    contributors: int
    next_group: tuple[str, ...]
    missed: Ranges
    error: Tensor | None = None
    mean_anchor: Tensor | None = None
    parts: tuple[counting.Part, ...] = ()
    sent: Callable[[], Tensor] | None = None


@dataclass(frozen=True)
class _Apart:
    """Given to rounds without most of the `peers` that were there before; others may have gone on
    too, and their state has none of it. `first` of `rounds` in a row."""

    first: int
    peers: int
    rounds: int = 0
    work_steps: int = 0
    g: Tensor | float = 0.0


Outcome = tuple[FragmentState, tuple[Tensor, ...]]  # what `merged` takes beside local parameters


class FragmentOptimizer:
    """The outer optimizer of one fragment on one peer.

    Args:
        state_hash: of an anchor, a momentum and a group.
        averaged: the ranges of running statistics.
        exact: how many of the last values are limbs of integers (`go_on_with_integers`).

    Attributes:
        in_flight: the contribution of the round that is on its way.
        failed: whether the fragment waits for another peer's state, its last round having failed.
        work_steps: inner steps since the last contribution.
        spread: of the anchor from the group's mean, when last met; relative."""

    def __init__(
        self,
        plan: Plan,
        state: FragmentState,
        state_hash: Callable[[Tensor, Tensor, tuple[str, ...]], int],
        averaged: Ranges = (),
        exact: int = 0,
    ) -> None:
        self.state, self._averaged, self._exact = state, averaged, exact
        self.in_flight: Contribution | None = None
        self.failed, self.work_steps = False, 0
        self.spread: float | None = None
        self._plan, self._state_hash = plan, state_hash
        self._nesterov = plan.nesterov
        self._update = plan.group_update() if plan.exchange == "pairs" else None
        self._start: Tensor | None = None  # that local parameters went on from, not the anchor
        # Others may have counted a try that came to nothing here, so the next try sends the same:
        # whichever of them is in the reduction, it is known what that is.
        self._failed_try: Contribution | None = None
        self._apart: _Apart | None = None
        # Where replicas keep the rest.
        self._sent: deque[counting.SentRound] = deque(maxlen=counting.REMEMBERED_ROUNDS)

    @property
    def start(self) -> Tensor:
        """The values that local parameters went on from: the anchor, or the next group's mean."""
        return self.state.anchor if self._start is None else self._start

    def commit(self, **changes: Any) -> None:
        """Replaces fields of the state, and its hash."""
        changed = replace(self.state, **changes)
        hashed = self._state_hash(changed.anchor, changed.momentum, changed.group)
        self.state = replace(changed, hash=hashed)

    def skip_to(self, round_: int) -> None:
        """The schedule says which round is next, where nobody makes up for a lost one."""
        self.state = replace(self.state, version=round_)

    def plain(self) -> dict[str, Any]:
        """All that the next rounds depend on, as numbers, lists and tensors, which are not copied:
        they are never written again. It goes with the local parameters of the same moment. What
        others have decoded of earlier rounds is left out: should one have been reduced twice, the
        difference is not made up for after a restart."""
        state, sent = self.state, self.in_flight
        found = {
            "version": state.version,
            "contributors": state.contributors,
            "group": list(state.group),
            "history": counting.to_plain(state.history),
            "told_until": state.told_until,
            "work_steps": self.work_steps,
            "failed": self.failed,
            "anchor": state.anchor,
            "momentum": state.momentum,
        }
        if self._start is not None:
            found["start"] = self._start
        if sent is not None and not (sent.everyone or sent.again):
            found["in_flight"] = sent.plain()
        if self._failed_try is not None:
            found["failed_try"] = self._failed_try.plain()
        if sent is not None and sent.again:
            found["sent_again_at"] = sent.step
        return found

    def restore(self, plain: Mapping[str, Any]) -> None:
        """Puts back what `plain` has made. A round that was on its way is to be begun again."""
        anchor, group = plain["anchor"], tuple(plain["group"])
        self.commit(
            version=plain["version"],
            contributors=plain["contributors"],
            group=group,
            anchor=anchor,
            momentum=plain.get("momentum", anchor.new_empty(0)),
            history=counting.from_plain(plain.get("history", ())),
            told_until=plain.get("told_until", 0),
        )
        self.work_steps, self.failed = plain.get("work_steps", 0), plain.get("failed", False)
        self._start = plain.get("start")
        tried, sent = plain.get("failed_try"), plain.get("in_flight")
        self._failed_try = None if tried is None else Contribution.from_plain(tried)
        self.in_flight = None if sent is None else Contribution.from_plain(sent)
        if self._failed_try is not None and (step := plain.get("sent_again_at")) is not None:
            self.in_flight = replace(self._failed_try, step=step, again=True)
        self._sent.clear()

    def start_from_anchor(self) -> None:
        """The local parameters are others: they are taken to have gone on from the anchor."""
        self.in_flight = self._start = self._failed_try = self._apart = None

    def renumber(self, version: int) -> None:
        """The run goes on after its last step, whose rounds were not the schedule's own."""
        self.state, self._failed_try = replace(self.state, version=version, history=()), None

    def contribute(self, g: Tensor, step: int) -> Contribution:
        """This peer's part in the next round, of `g` (1-D fp32, fresh) after inner step `step`; in
        another try of a round, what the first had sent."""
        if (earlier := self._to_send_again()) is not None:
            self.in_flight = replace(earlier, step=step, again=True)
            self.work_steps = max(0, self.work_steps - earlier.work_steps)
            return self.in_flight
        state = self.state
        values = g if self._update is None else self._update.contribution(g, state.momentum)
        self.in_flight = Contribution(state.version, step, g, values, self.work_steps)
        self.work_steps = 0
        return self.in_flight

    @property
    def last_contribution(self) -> Contribution | None:
        """The part of what was learned since the start that is on its way or will be sent again."""
        if self.in_flight is None:
            return self._to_send_again()
        return None if self.in_flight.everyone else self.in_flight

    def _to_send_again(self) -> Contribution | None:
        """The contribution of an earlier try of the next round."""
        earlier = self._failed_try
        if earlier is None or earlier.round != self.state.version or self._update is not None:
            return None
        return earlier if self._plan.payload == "pseudo_gradient" else None

    def contribute_values(self, values: Tensor, step: int) -> Contribution:
        """The anchor or the local parameters, for the average over everyone that ends a run. Where
        all have one anchor the way to it travels: its norm is bounded as in any other round."""
        if self._update is None:
            values = self.state.anchor - values
        self.in_flight = Contribution(self.state.version, step, values, values, everyone=True)
        return self.in_flight

    def go_on_from(self, mean_anchor: Tensor, local: Tensor) -> Tensor | None:
        """The local parameters moved to a start from the next group's mean anchor; None where
        that comes too late, or the plan has no such start."""
        if self._update is None or self.in_flight is not None or self._start is not None:
            return None
        start = self._update.early_start(mean_anchor)
        if start is None:
            return None
        if self._exact:  # they stay until the round
            start = diloco.take_integers(start.clone(), self.state.anchor, self._exact)
        self._start = start
        return diloco.carry_over(local, self.state.anchor, start)

    def reposition(self, step: int) -> None:
        """This peer's position in the schedule is another now."""
        if self.in_flight is not None and self.in_flight.step > step:
            self.in_flight = replace(self.in_flight, step=step)

    def only_merges(self, result: RoundResult) -> bool:
        """Tells whether local parameters after a round that closed follow value by value from those
        before. Then `outcome`, `advance` and `merged` will do, and `apply` is not needed."""
        again = self.in_flight is not None and self.in_flight.again
        special = self._update is not None or self._exact
        return not (special or again or result.missed or self._start is not None)

    def outcome(self, result: RoundResult) -> Callable[[], Outcome]:
        """Computes what a round leads to that closed and `only_merges`: the state, and what
        `merged` takes beside the local parameters. To be run in any thread; nothing is changed."""
        state, kept = self.state, self._keeping(result)

        def computed() -> Outcome:
            after = self._after(state, result, *self._outer_step(state, result))
            return after, (after.anchor, *kept)

        return computed

    def advance(self, result: RoundResult, after: FragmentState) -> None:
        """Commits such a round. Args: after: its `outcome`."""
        self._note_sent(self._closed(), result)
        self.state = after

    def merged(self, local: Tensor, anchor: Tensor, *kept: Tensor) -> Tensor:
        """The local parameters to go on from after such a round, fresh; or those of any range."""
        if kept:
            start, g, error = kept
            anchor = diloco.keep_unsent(local, start, anchor, g, error)
        return diloco.merge(local, anchor, self._plan.merge_alpha)

    def _keeping(self, result: RoundResult) -> tuple[Tensor, ...]:
        """(start, g, error) of `keep_unsent`, where replicas keep what was not sent."""
        if not self._plan.keeps:
            return ()
        assert self.in_flight is not None, "its round has closed"
        assert result.error is not None, "replicas keep it"
        return self.start, self.in_flight.g, result.error

    def apply(self, result: RoundResult, local: Tensor) -> Tensor:
        """Commits a round that closed, and returns the local parameters to go on from."""
        old, kept, contribution = self.state, self._keeping(result), self._closed()
        own = self._from_anchor(local)
        anchor, momentum = self._outer_step(old, result)
        if contribution.again and not self._plan.keeps:
            merged = diloco.carry_over(own + contribution.g, old.anchor, anchor)
        else:
            merged = self.merged(local, anchor, *kept)
        for start, stop in result.missed:
            here = slice(start, stop)
            merged[here] = diloco.carry_over(own[here], old.anchor[here], anchor[here])
        if result.missed:
            self.work_steps += contribution.work_steps
        self._note_sent(contribution, result)
        self.state = self._after(old, result, anchor, momentum)
        given, exact = contribution.g, self._exact
        return diloco.go_on_with_integers(merged, local, old.anchor, given, anchor, exact)

    def _note_sent(self, sent: Contribution, result: RoundResult) -> None:
        """Before a round that closed is committed."""
        if self._plan.keeps and result.sent is not None:
            taken = complement(result.missed, len(sent.g))
            self._sent.append(counting.SentRound(result.round, result.sent, taken))
        apart = self._apart or _Apart(result.round, len(self.state.group))
        if self._plan.exchange == "pairs" or 2 * result.contributors > apart.peers:
            self._apart = None
        elif not self._plan.keeps and apart.rounds < _MOST_APART:
            rounds, g = apart.rounds + 1, apart.g + sent.g
            for start, stop in result.missed:  # there the local parameters keep it
                g[start:stop] -= sent.g[start:stop]
            work_steps = apart.work_steps + (0 if result.missed else sent.work_steps)
            self._apart = replace(apart, rounds=rounds, work_steps=work_steps, g=g)

    def _after(
        self, state: FragmentState, result: RoundResult, anchor: Tensor, momentum: Tensor
    ) -> FragmentState:
        group = result.next_group or state.group
        return FragmentState(
            version=max(state.version, result.round + 1),  # the schedule's may be further in pairs
            contributors=result.contributors,
            group=group,
            anchor=anchor,
            momentum=momentum,
            hash=self._state_hash(anchor, momentum, group),
            history=counting.recorded(state.history, result.round, result.parts),
            told_until=state.told_until,
        )

    def apply_gradients(self, result: RoundResult) -> None:
        """Takes note of a round of gradients; the parameters are committed after the inner step."""
        self._closed()
        count, group = result.contributors, result.next_group
        self.state = replace(self.state, version=result.round + 1, contributors=count, group=group)

    def apply_final_average(self, result: RoundResult) -> Tensor:
        """Takes the mean of what everyone has, and goes on from it."""
        self._ended()
        self.spread, self.failed = 0.0, False
        mean = self.state.anchor - result.mean if self._update is None else result.mean
        self.commit(
            version=result.round + 1,
            contributors=result.contributors,
            group=result.next_group or self.state.group,
            anchor=mean,
            momentum=self.state.momentum.new_zeros(self.state.momentum.shape),
        )
        return mean

    def abandon(self, counted: Ranges, error: Tensor | None, local: Tensor) -> Tensor | None:
        """Ends a round that came to nothing. Returns other local parameters to go on from, if any.
        Args: counted: ranges known to count this peer's part; error: as `RoundResult`'s."""
        contribution, self.failed = self._ended(), True
        moved, local = self._start is not None, self._from_anchor(local)
        if contribution.everyone:  # nothing was learned that others could have counted
            return None
        if self._update is not None:  # this round is not made up for: others have gone on
            self.skip_to(max(self.state.version, contribution.round + 1))
            self.failed = False
        self.work_steps += contribution.work_steps
        self._count(contribution, counted, error)
        return local if moved else None

    def release(
        self, version: int, local: Tensor, counted: Ranges = (), error: Tensor | None = None
    ) -> Tensor:
        """Ends a round in flight that another peer's state of this version holds already, or knows
        nothing of: it is of an earlier version. `counted` and `error` are as in `abandon`, if
        known. Returns the local parameters without another start."""
        local, back = self._from_anchor(local), version < self.state.version
        if self.in_flight is None or (self.in_flight.round >= version and not back):
            return local
        contribution = self._ended()
        if not contribution.everyone and not back:
            if error is None and self._plan.keeps:
                error = contribution.values - self._encoded(contribution.values)()
            self._count(contribution, counted, error)
        return local

    def take_back(self, given_up: int, local: Tensor) -> Tensor:
        """The local parameters with what was given to rounds of a minority, where so many of the
        last rounds are in no state that comes. Before `adopt`."""
        apart, self._apart = self._apart, None
        if apart is None or apart.first < self.state.version - given_up:
            return local
        self.work_steps += apart.work_steps
        return local - apart.g

    def adopt(self, theirs: FragmentState, local: Tensor, *, keep: bool, me: str = "") -> Tensor:
        """Takes over another peer's state. With `keep` what was learned since the own anchor is
        kept, but for what the new anchor has of it. `me` is this peer's name as a contributor."""
        if theirs.version < self.state.version:  # what was sent since is of no history that counts
            self._sent.clear()
            self._failed_try = None
        mine, earlier, local = self.state, self._failed_try, local.clone()
        if not (self._plan.keeps or (earlier and earlier.round == mine.version)):
            # Before it was started again this peer has contributed what it had learned by then.
            for start, stop in counting.counted_of(theirs.history, mine.version, me) or ():
                local[start:stop] = mine.anchor[start:stop]
        for place, sent in enumerate(self._sent):
            if (ranges := counting.counted_of(theirs.history, sent.round, me)) is not None:
                self._sent[place] = counting.reconcile(local, sent, ranges)
        if earlier is not None and earlier.round < theirs.version:
            self._failed_try = None
            # The new state holds already this peer's part in a round that others finished.
            if (ranges := counting.counted_of(theirs.history, earlier.round, me)) is not None:
                earlier = replace(earlier, ranges=ranges)
            self._take_out(earlier, local)
        self.state, self.failed = theirs, False
        if not keep:
            self._sent.clear()
            return theirs.anchor
        moved = diloco.carry_over(local, mine.anchor, theirs.anchor)
        return diloco.take_integers(moved, theirs.anchor, self._exact)

    def _ended(self) -> Contribution:
        contribution, self.in_flight = self.in_flight, None
        assert contribution is not None, "a round that ends is in flight"
        return contribution

    def _closed(self) -> Contribution:
        self._failed_try, self.failed = None, False
        return self._ended()

    def _outer_step(self, state: FragmentState, result: RoundResult) -> tuple[Tensor, Tensor]:
        """Fresh (anchor, momentum)."""
        if self._update is None or result.mean_anchor is None:
            stepped = self._nesterov.step(state.anchor, state.momentum, result.mean)
            return diloco.take_mean(stepped, state.anchor, result.mean, self._averaged)
        if result.contributors > 1:  # a peer that sits out meets nobody
            values = slice(len(state.anchor) - self._exact)
            self.spread = relative_distance(state.anchor[values], result.mean_anchor[values])
        middle = result.mean_anchor
        stepped = self._update.step(state.anchor, state.momentum, result.mean, middle)
        return diloco.take_mean(stepped, middle, result.mean, self._averaged)

    def _from_anchor(self, local: Tensor) -> Tensor:
        """The local parameters as if they had gone on from the anchor, which they do from now."""
        start, self._start = self._start, None
        return local if start is None else diloco.carry_over(local, start, self.state.anchor)

    def _count(self, contribution: Contribution, ranges: Ranges, error: Tensor | None) -> None:
        """Notes a failed try. What an earlier try of the same round had counted stays so."""
        earlier = self._failed_try
        if earlier is not None and earlier.round == contribution.round:
            ranges = union(ranges, earlier.ranges or ())
            error = earlier.error if error is None else error
        self._failed_try = replace(contribution, ranges=ranges, error=error)

    def _take_out(self, failed: Contribution, local: Tensor) -> None:
        """Takes what another peer's anchor has of a failed try out of the local parameters."""
        g, ranges = failed.g, failed.ranges or ()
        if not self._plan.keeps:
            for start, stop in ranges:
                local[start:stop] += g[start:stop]
            return
        values = g if failed.error is None else g - failed.error  # what its encoding has kept
        sent = counting.SentRound(failed.round, lambda: values, ())
        taken = counting.reconcile(local, sent, ranges)
        self._sent.append(replace(taken, values=self._encoded(values)))

    def _encoded(self, values: Tensor) -> Callable[[], Tensor]:
        """A contribution as others decode it, which takes the memory of its encoding."""
        codec, kept, count = codec_by_name(self._plan.codec), values.clone(), len(values)
        kept[count - self._exact :] = 0.0  # integers come with a state as they are
        raw = codec.encode(kept)
        return lambda: codec.decode(raw, count)
