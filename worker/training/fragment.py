"""One fragment on this peer: its committed state, and at most one round in flight.

Decides what is contributed and what becomes of the local parameters when a round ends, whichever
way it does; computes fresh tensors and writes none that are known outside. train thread only.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from algorithms.diloco import (
    Nesterov,
    carry_over,
    eager_mean,
    keep_residual,
    merge,
    others_share,
    with_residual,
)
from algorithms.fragment_state import FragmentState
from algorithms.fragments import Fragment
from algorithms.noloco import relative_distance
from algorithms.plan import Plan
from worker.training.inbox import PrefetchedAnchor, RoundDone, RoundFailed
from worker.wire import state_hash

Ranges = Iterable[tuple[int, int]]


@dataclass(frozen=True)
class Sent:
    """A contribution on its way: after which step, this peer's own part `g`, and the `values` that
    travel, `g` with momentum and residual. `guess` is the anchor that the local parameters went on
    from; `work_steps` are the inner steps that it stands for; `everyone`: it is the anchor, for the
    pass that ends a run in pairs."""

    round: int
    step: int
    g: Tensor
    values: Tensor
    guess: Tensor | None = None
    work_steps: int = 1
    everyone: bool = False


@dataclass(frozen=True)
class Counted:
    """What of a round that this peer did not apply is in its reduction all the same: it comes with
    another peer's state, or with the next try, and must not be contributed again."""

    round: int
    g: Tensor
    ranges: tuple[tuple[int, int], ...]
    error: Tensor | None

    def after(self, earlier: "Counted | None") -> "Counted":
        """Together with an earlier try of the same round: what that one had counted stays so."""
        if earlier is None or earlier.round != self.round:
            return self
        g, error = self.g.clone(), None if self.error is None else self.error.clone()
        for start, stop in earlier.ranges:
            g[start:stop] = earlier.g[start:stop]
            if error is not None and earlier.error is not None:
                error[start:stop] = earlier.error[start:stop]
        return Counted(self.round, g, union(self.ranges, earlier.ranges), error)


class FragmentReplica:
    """Args:
    fragment, plan: what is exchanged, and how.
    state: the committed state, fresh or from a checkpoint.
    """

    def __init__(self, fragment: Fragment, plan: Plan, state: FragmentState) -> None:
        self.fragment, self.state = fragment, state
        self.residual: Tensor | None = None
        self.others: Tensor | None = None
        self.contributors = 0
        self.sent: Sent | None = None
        self.arrived: RoundDone | RoundFailed | None = None
        self.failed = False
        self.work_steps = 0  # inner steps since the last contribution
        self.spread: float | None = None  # of the anchor from the group's mean, when last met
        self._plan = plan
        self._nesterov = Nesterov(plan.outer_lr, plan.outer_momentum)
        self._update = plan.group_update() if plan.exchange == "pairs" else None
        self._ahead: PrefetchedAnchor | None = None
        self._start: Tensor | None = None  # that local parameters went on from, not the anchor
        self._counted: Counted | None = None

    def send(self, g: Tensor, step: int) -> Sent:
        """Takes this peer's part in the next round (1-D fp32, fresh)."""
        plan, state = self._plan, self.state
        residual = self.residual if plan.error_feedback else None
        guess = None
        if plan.eager and self.others is not None:
            expected = eager_mean(g, self.others, self.contributors)
            guess, _ = self._nesterov.step(state.anchor, state.momentum, expected)
        values = g if self._update is None else self._update.contribution(g, state.momentum)
        values = with_residual(values, residual, plan.error_decay)
        self.sent = Sent(state.version, step, g, values, guess, self.work_steps)
        self.work_steps = 0
        return self.sent

    @property
    def start(self) -> Tensor:
        """What the local parameters went on from: the anchor, or the mean of the next group's."""
        return self.state.anchor if self._start is None else self._start

    @property
    def knows_ahead(self) -> bool:
        """Whether the mean anchor of the next round's group has come, or will not."""
        return self._ahead is not None and self._ahead.round == self.state.version

    def go_on_from_group(self, local: Tensor) -> Tensor | None:
        """The local parameters moved to a start from the next group's mean anchor, if that has come
        since the last call, and in time; else None."""
        ahead, self._ahead = (self._ahead if self.knows_ahead else None), None
        late = self.sent is not None or self._start is not None
        if self._update is None or late or ahead is None or ahead.mean_anchor is None:
            return None
        self._start = self._update.head_start(ahead.mean_anchor)
        return None if self._start is None else carry_over(local, self.state.anchor, self._start)

    def take(self, message: RoundDone | RoundFailed | PrefetchedAnchor) -> None:
        """The end of a round, passed over when it is not the one in flight; or anchors ahead of the
        next."""
        if isinstance(message, PrefetchedAnchor):
            self._ahead = message
        elif self.sent is not None and self.sent.round == message.round:
            self.arrived = message

    def apply(self, sent: Sent, result: RoundDone, local: Tensor) -> Tensor:
        """Commits the round, and returns the local parameters to go on from."""
        old = self.state
        own = _without_guess(sent, old_anchor=old.anchor, local=self._from_anchor(local))
        self._start = None
        anchor, momentum = self._outer_step(old, result)
        if sent.guess is not None:
            merged = carry_over(local, sent.guess, anchor)
        else:
            merged = merge(local, anchor, self._plan.merge_alpha)
        for start, stop in result.missed:
            here = slice(start, stop)
            merged[here] = carry_over(own[here], old.anchor[here], anchor[here])
        if result.missed:
            self.work_steps += sent.work_steps
        earlier = self.settle(result)
        if earlier is not None:
            # These ranges closed in an earlier try, with what was contributed then: what has been
            # learned since is still to come.
            for start, stop in earlier.ranges:
                here = slice(start, stop)
                since = own[here] + earlier.g[here]
                merged[here] = carry_over(since, old.anchor[here], anchor[here])
        if self._plan.eager:
            self.others = others_share(result.mean, sent.g, result.contributors)
            self.contributors = result.contributors
        self.commit(
            version=max(old.version, result.round + 1),  # the schedule's may be further in pairs
            contributors=result.contributors,
            group=result.next_group or old.group,
            anchor=anchor,
            momentum=momentum,
        )
        return merged

    def _outer_step(self, state: FragmentState, result: RoundDone) -> tuple[Tensor, Tensor]:
        """Fresh (anchor, momentum)."""
        if self._update is None or result.mean_anchor is None:
            return self._nesterov.step(state.anchor, state.momentum, result.mean)
        if result.contributors > 1:  # who sits out meets nobody
            self.spread = relative_distance(state.anchor, result.mean_anchor)
        return self._update.step(state.anchor, state.momentum, result.mean, result.mean_anchor)

    def send_anchor(self, round_: int, step: int) -> Sent:
        """Takes the anchor to the pass over everyone that ends a run in pairs."""
        self.enter(round_)
        anchor = self.state.anchor
        self.sent = Sent(round_, step, anchor, anchor, everyone=True)
        return self.sent

    def agree(self, result: RoundDone) -> Tensor:
        """Takes the mean of everyone's anchors, and goes on from it."""
        self.sent, self.spread, self.failed = None, 0.0, False
        self.commit(
            version=result.round + 1,
            contributors=result.contributors,
            group=result.next_group or self.state.group,
            anchor=result.mean,
            momentum=self.state.momentum.new_zeros(self.state.momentum.shape),
        )
        return result.mean

    def settle(self, result: RoundDone) -> Counted | None:
        """Takes what the round leaves over into the residual; an earlier try of it that counted in
        part, if there was one."""
        earlier, self._counted = self._counted, None
        if earlier is not None and earlier.round != result.round:
            earlier = None
        if result.error is not None:
            # The local parameters keep alpha of what the anchor has not got.
            share = 1 - self._plan.merge_alpha
            self.residual = keep_residual(result.error, self.residual, result.missed, share)
            if earlier is not None:
                self._leave_over(earlier)
        self.failed = False
        return earlier

    def fail(self, sent: Sent, result: RoundFailed, local: Tensor) -> Tensor | None:
        """The round came to nothing; the local parameters to go on from, None for the same."""
        self.failed = True
        moved, local = self._start is not None, self._from_anchor(local)
        self._start = None
        if sent.everyone:  # nothing was learned that others could have counted
            return None
        if self._update is not None:  # this round is not made up for: others have gone on
            self.enter(max(self.state.version, sent.round + 1))
            self.failed = False
        self.work_steps += sent.work_steps
        counted = Counted(sent.round, sent.g, result.counted, result.error)
        self._counted = counted.after(self._counted)
        if sent.guess is None:
            return local if moved else None
        return _without_guess(sent, old_anchor=self.state.anchor, local=local)

    def give_up(self, version: int, local: Tensor) -> Tensor:
        """Another peer's state of this version comes: a round in flight that it holds already ends.

        Returns the local parameters, a guess or another start taken out of them.
        """
        local, self._start = self._from_anchor(local), None
        sent = self.sent
        if sent is None or sent.round >= version:
            return local
        arrived, self.sent, self.arrived = self.arrived, None, None
        if arrived is not None and not sent.everyone:
            ranges = (
                arrived.counted
                if isinstance(arrived, RoundFailed)
                else complement(arrived.missed, self.fragment.elements)
            )
            self._counted = Counted(sent.round, sent.g, ranges, arrived.error).after(self._counted)
        return _without_guess(sent, old_anchor=self.state.anchor, local=local)

    def adopt(self, theirs: FragmentState, local: Tensor, *, keep: bool) -> Tensor:
        """Takes over another peer's state; own progress against the anchor is kept if asked to."""
        mine, earlier = self.state, self._counted
        if earlier is not None and earlier.round < theirs.version:
            self._counted = None
            # The new state holds already this peer's part in a round that others finished.
            local = local.clone()
            for start, stop in earlier.ranges:
                local[start:stop] += earlier.g[start:stop]
            self._leave_over(earlier)
        if self.sent is not None and self.sent.guess is not None:
            moved = carry_over(self.sent.guess, mine.anchor, theirs.anchor)
            self.sent = replace(self.sent, guess=moved)
        self.state, self.failed = theirs, False
        self.others = None
        return carry_over(local, mine.anchor, theirs.anchor) if keep else theirs.anchor

    def enter(self, round_: int) -> None:
        """The schedule says which round is next, where nobody makes up for a lost one."""
        self.state = replace(self.state, version=round_)

    def rebase(self, step: int) -> None:
        """This peer's position in the schedule is another now."""
        if self.sent is not None and self.sent.step > step:
            self.sent = replace(self.sent, step=step)

    def own(self, local: Tensor) -> Tensor:
        """The local parameters as if they had not gone on from a guess or another start."""
        local = self._from_anchor(local)
        if self.sent is None:
            return local
        return _without_guess(self.sent, old_anchor=self.state.anchor, local=local)

    def _from_anchor(self, local: Tensor) -> Tensor:
        """The local parameters as if they had gone on from the anchor."""
        if self._start is None:
            return local
        return carry_over(local, self._start, self.state.anchor)

    def commit(self, **changes: Any) -> None:
        """Replaces fields of the state, and hashes it anew."""
        changed = replace(self.state, **changes)
        hashed = state_hash(changed.anchor, changed.momentum, changed.group)
        self.state = replace(changed, hash=hashed)

    def _leave_over(self, counted: Counted) -> None:
        """The encoding of an earlier try has left something out of the ranges that counted."""
        if counted.error is None:
            return
        residual = counted.error.new_zeros(counted.error.shape)
        if self.residual is not None:
            residual.copy_(self.residual)
        for start, stop in counted.ranges:
            residual[start:stop] = counted.error[start:stop]
        self.residual = residual


def union(some: Ranges, others: Ranges) -> tuple[tuple[int, int], ...]:
    """The ranges that cover what either covers, in order."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted((*some, *others)):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)


def complement(ranges: Ranges, elements: int) -> tuple[tuple[int, int], ...]:
    """The ranges of 0..elements that are in none of these, which are in order."""
    at, rest = 0, []
    for start, stop in ranges:
        rest.append((at, start))
        at = stop
    rest.append((at, elements))
    return tuple((start, stop) for start, stop in rest if start < stop)


def _without_guess(sent: Sent, *, old_anchor: Tensor, local: Tensor) -> Tensor:
    """The local parameters as if they had not gone on from a guess."""
    if sent.guess is None:
        return local
    return carry_over(local, sent.guess, old_anchor - sent.g)
