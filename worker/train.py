"""The train thread: inner steps, and outer rounds between two of them.

Nothing here awaits and no coroutine touches a parameter. An outer update computes fresh tensors and
commits by copy, so that an error commits nothing. When a round fails, the local parameters are kept
and the anchor waits for another peer's state; when a round closed without this peer, what it has
learned is carried over into the next.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from algorithms.fragments import Fragment
from algorithms.merge import carry_over, merge
from algorithms.outer import Nesterov
from algorithms.plan import Plan
from algorithms.pseudogradient import pseudo_gradient
from algorithms.schedule import Due
from worker.inner import Replica
from worker.mailbox import (
    Adopt,
    Begin,
    FragmentState,
    Mailbox,
    Progress,
    Published,
    RoundDone,
    RoundFailed,
    Started,
    Stop,
    ToTrain,
)
from worker.membership import Phase
from worker.wire import is_finite, state_hash

_PROGRESS_S = 0.5
_CURVE_POINTS = 400
_SETTLE_POLL_S = 0.1


@dataclass
class Tally:
    """What a worker's life came to: steps taken here, seconds, rounds."""

    inner_steps: int = 0
    compute_s: float = 0.0
    stall_s: float = 0.0
    first_step_at: float | None = None
    last_step_at: float | None = None
    rounds_completed: int = 0
    rounds_failed: int = 0
    adoptions: int = 0
    curve: list[tuple[int, float]] = field(default_factory=list)

    @property
    def wall_s(self) -> float:
        """From the first inner step to the last."""
        if self.first_step_at is None or self.last_step_at is None:
            return 0.0
        return self.last_step_at - self.first_step_at

    @property
    def compute_utilization(self) -> float:
        """Share of that time in forward, backward and inner step."""
        return self.compute_s / self.wall_s if self.wall_s > 0 else 0.0


@dataclass(frozen=True)
class _InFlight:
    """A round that was sent: after which step, and what."""

    round: int
    step: int
    values: Tensor


class Trainer:
    """One worker's training loop. train thread only.

    Args:
        replica: model, inner optimizer and samples.
        fragments, plan, steps: what is exchanged, how, and until when.
        states: the committed state of each fragment, fresh or from a checkpoint.
        step: position in the schedule to go on from.
        mailbox: the way to the I/O thread.
        checkpoint: called now and then between two steps, with this trainer.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        replica: Replica,
        fragments: Sequence[Fragment],
        plan: Plan,
        steps: int,
        states: Sequence[FragmentState],
        step: int,
        mailbox: Mailbox,
        checkpoint: Callable[["Trainer"], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.replica, self.states, self.step = replica, list(states), step
        self.tally = Tally()
        self.stopped: Stop | None = None
        self._fragments, self._plan, self._steps = fragments, plan, steps
        self._schedule = plan.schedule(fragments=len(fragments), steps=steps)
        self._outer = Nesterov(plan.outer_lr, plan.outer_momentum)
        self._mailbox, self._checkpoint, self._clock = mailbox, checkpoint, clock
        self._phase = Phase.READY
        self._exchanges = plan.exchange == "mean"
        self._gradients = plan.payload == "gradient"
        self._in_flight: dict[int, _InFlight] = {}
        self._arrived: dict[int, RoundDone | RoundFailed] = {}
        self._failed: set[int] = set()
        self._counted: dict[int, tuple[_InFlight, RoundFailed]] = {}
        self._progress_at = -math.inf
        self._recent: list[float] = []
        self._curve_every = max(1, steps // _CURVE_POINTS)

    # ----------------------------------------------------------------------------------- the run

    def run(self) -> None:
        """Trains until the schedule's last step or a Stop; afterwards `stopped` says which.

        Raises:
            Exception: what ended the I/O thread, if that is why.
        """
        self._publish()
        self._event("progress", state="ready")
        self._await_start()
        self._phase = Phase.TRAINING
        self._publish()
        while self.step < self._steps and self.stopped is None:
            self._one_step()
        if self.stopped is not None and self.stopped.error is not None:
            raise self.stopped.error
        if not self._exchanges:
            self._commit_parameters()
        self._phase = Phase.DONE
        self._publish()

    def settle(self, agreed: Callable[[], bool], timeout_s: float) -> None:
        """After the last step: stays until the others are done too, and takes over what the last
        of them has; a Stop or the time-out ends it."""
        deadline = self._clock() + timeout_s
        while self.stopped is None and self._clock() < deadline and not agreed():
            self._take(self._mailbox.wait(_SETTLE_POLL_S))

    def _await_start(self) -> None:
        while self.stopped is None:
            message = self._mailbox.wait()
            if isinstance(message, Started):
                if message.group:
                    self.states = [self._state(s, group=message.group) for s in self.states]
                self._event("started", group=list(self.states[0].group), step=self.step)
                return
            self._take(message)

    def _one_step(self) -> None:
        self.step += 1
        started = self._clock()
        if self.tally.first_step_at is None:
            self.tally.first_step_at = started
        gradients = dict(self.replica.backward(self.step))
        self.tally.compute_s += self._clock() - started
        if self._gradients and self._exchanges:
            self._average(gradients)
        resumed = self._clock()
        self.replica.inner_step(self.step, gradients)
        self.tally.last_step_at = self._clock()
        self.tally.compute_s += self.tally.last_step_at - resumed
        self.tally.inner_steps += 1
        self._note_loss()
        if self._gradients:
            self._commit_parameters()
        elif self._exchanges:
            self._rounds()
        while (message := self._mailbox.poll()) is not None:
            self._take(message)
        self._report()
        self._checkpoint(self)

    # ------------------------------------------------------------------- rounds of pseudo-gradients

    def _rounds(self) -> None:
        """Applies what is due, then sends what is due.

        The schedule says when and how many; which round it is follows from the states' versions, so
        that a round which came to nothing is made up for at the next occasion. All peers take the
        rounds in one order (`_turn`), whatever happened to each: otherwise two could wait for each
        other's fragments crosswise.
        """
        step = self.step
        for index in self._waiting()[: len(self._schedule.applies(step))]:
            self._apply(index)
        idle = [index for index in range(len(self.states)) if index not in self._in_flight]
        idle.sort(key=lambda index: self._turn(index, self.states[index].version))
        for index in idle[: len(self._schedule.sends(step))]:
            self._send(index)
        if self._schedule.applies_at_once(step):
            for index in self._waiting():
                self._apply(index)

    def _turn(self, index: int, round_: int) -> tuple[int, int]:
        """Where a round stands in the order of all rounds: by its step in an undisturbed run."""
        return (self._schedule.send_step(Due(index, round_)), index)

    def _waiting(self) -> list[int]:
        """The fragments in flight, in the order of their rounds."""
        return sorted(self._in_flight, key=lambda i: self._turn(i, self._in_flight[i].round))

    def _send(self, index: int) -> None:
        fragment = self._fragments[index]
        anchor = self.states[index].anchor
        g = pseudo_gradient(anchor, fragment.flatten(self.replica.parameters))
        if not is_finite(g):
            # Others wait for this peer: no movement is a better answer than none.
            self._event("warning", text="parameters are not finite: going on from the anchor")
            self._write(fragment, anchor)
            self.replica.reset_moments()
            g = torch.zeros_like(anchor)
        self._begin(index, g)

    def _begin(self, index: int, values: Tensor) -> None:
        state = self.states[index]
        self._in_flight[index] = _InFlight(state.version, self.step, values)
        self._publish()
        self._mailbox.post(Begin(index, state.version, state.group, values))

    def _apply(self, index: int) -> None:
        """Waits for a round that was sent, and applies its mean."""
        result = self._await_round(index)
        if result is None:
            return
        state, fragment = self.states[index], self._fragments[index]
        anchor, momentum = self._outer.step(state.anchor, state.momentum, result.mean)
        local = fragment.flatten(self.replica.parameters)
        merged = merge(local, anchor, self._plan.merge_alpha)
        for start, stop in result.missed:
            here = slice(start, stop)
            merged[here] = carry_over(local[here], state.anchor[here], anchor[here])
        earlier = self._counted.pop(index, None)
        if earlier is not None and earlier[0].round == result.round:
            # These ranges closed in an earlier try, with what was contributed then: what has been
            # learned since is still to come.
            for start, stop in earlier[1].counted:
                here = slice(start, stop)
                since = local[here] + earlier[0].values[here]
                merged[here] = carry_over(since, state.anchor[here], anchor[here])
        self._write(fragment, merged)
        self._commit(result, anchor, momentum)

    def _commit(self, result: RoundDone, anchor: Tensor, momentum: Tensor) -> None:
        self.states[result.fragment] = self._state(
            self.states[result.fragment],
            version=result.round + 1,
            contributors=result.contributors,
            group=result.next_group,
            anchor=anchor,
            momentum=momentum,
        )
        self._publish()

    def _await_round(self, index: int) -> RoundDone | None:
        """The result of a fragment's round in flight; None when it failed or came to nothing."""
        sent = self._in_flight.get(index)
        if sent is None:
            return None
        started = self._clock()
        if index not in self._arrived:
            self._report(state="waiting")
        while (
            self._in_flight.get(index) == sent
            and index not in self._arrived
            and self.stopped is None
        ):
            self._take(self._mailbox.wait())
        stall_s = self._clock() - started
        self.tally.stall_s += stall_s
        result = self._arrived.pop(index, None)
        if self._in_flight.get(index) != sent or result is None:
            return None  # another peer's state took its place, or the run is stopping
        del self._in_flight[index]
        if isinstance(result, RoundFailed):
            if result.counted:
                self._counted[index] = (sent, result)
            self._fail(index, result.reason, result.waiting_for)
            return None
        self._failed.discard(index)
        self.tally.rounds_completed += 1
        self._event(
            "round",
            fragment=index,
            round=sent.round,
            contributors=result.contributors,
            missed=bool(result.missed),
            stall_s=round(stall_s, 4),
        )
        return result

    def _fail(self, index: int, reason: str, waiting_for: tuple[str, ...] = ()) -> None:
        """A round of this peer's has come to nothing: local parameters are kept."""
        self.tally.rounds_failed += 1
        self._failed.add(index)
        self._event(
            "round_failed",
            fragment=index,
            round=self.states[index].version,
            reason=reason,
            waiting_for=list(waiting_for),
        )
        self._publish()

    # -------------------------------------------------------------------- data-parallel gradients

    def _average(self, gradients: dict[str, Tensor]) -> None:
        """Replaces the gradients by their mean over the group; keeps them where a round fails."""
        for fragment in self._fragments:
            self._begin(fragment.index, fragment.flatten(gradients))
        for fragment in self._fragments:
            result = self._await_round(fragment.index)
            if result is not None:
                gradients.update(fragment.views(result.mean))
                # The parameters that come of it are committed after the inner step.
                self.states[fragment.index] = replace(
                    self.states[fragment.index],
                    version=result.round + 1,
                    contributors=result.contributors,
                    group=result.next_group,
                )

    def _commit_parameters(self) -> None:
        """Without an outer optimizer the anchor is the local model."""
        for fragment in self._fragments:
            anchor = fragment.flatten(self.replica.parameters)
            self.states[fragment.index] = self._state(self.states[fragment.index], anchor=anchor)
        self._publish()

    # --------------------------------------------------------------------------- from the mailbox

    def _take(self, message: ToTrain | None) -> None:
        match message:
            case RoundDone() | RoundFailed():
                sent = self._in_flight.get(message.fragment)
                if sent is not None and sent.round == message.round:
                    self._arrived[message.fragment] = message
            case Adopt():
                self._adopt(message)
            case Stop():
                self.stopped = message
            case Started() | None:
                pass

    def _adopt(self, adopt: Adopt) -> None:
        """Takes over another peer's committed states; own progress against the anchor is kept."""
        taken = []
        for index, theirs in sorted(adopt.states.items()):
            mine, fragment = self.states[index], self._fragments[index]
            sent = self._in_flight.get(index)
            if sent is not None and sent.round <= theirs.version:
                del self._in_flight[index]
                given_up = self._arrived.pop(index, None)
                if isinstance(given_up, RoundFailed):
                    self._counted[index] = (sent, given_up)
            ranks = [(s.version, s.contributors, s.hash) for s in (mine, theirs)]
            # Before the start the others' group wins: theirs is the run under way.
            joining = self._phase is Phase.READY and theirs.version >= mine.version
            if ranks[1] <= ranks[0] and not joining:
                continue
            local = fragment.flatten(self.replica.parameters)
            self._take_back_counted(index, theirs.version, local)
            if self._gradients or torch.equal(local, mine.anchor):
                moved = theirs.anchor
            else:
                moved = carry_over(local, mine.anchor, theirs.anchor)
            self._write(fragment, moved)
            self.states[index] = theirs
            self._failed.discard(index)
            taken.append(index)
        if not taken:
            return
        self.tally.adoptions += 1
        if len(adopt.states) == len(self.states):
            # All of the other's state belongs to a step of its schedule, even an earlier one than
            # this peer's: else the two would wait for each other's rounds crosswise from now on.
            self.step = adopt.step if self._phase is not Phase.DONE else self.step
        self._event(
            "adopted",
            donor=adopt.donor,
            fragments=taken,
            step=self.step,
            reason=adopt.reason,
        )
        self._publish()

    def _take_back_counted(self, index: int, version: int, local: Tensor) -> None:
        """Removes from `local` what the new state holds already: this peer's part in a round that
        others finished and it did not."""
        sent, given_up = self._counted.pop(index, (None, None))
        if sent is not None and given_up is not None and sent.round < version:
            for start, stop in given_up.counted:
                local[start:stop] += sent.values[start:stop]

    # ---------------------------------------------------------------------------------- helpers

    def _state(self, state: FragmentState, **changes: object) -> FragmentState:
        changed = replace(state, **changes)  # type: ignore[arg-type]
        hashed = state_hash(changed.anchor, changed.momentum, changed.group)
        return replace(changed, hash=hashed)

    def _write(self, fragment: Fragment, values: Tensor) -> None:
        for name, value in fragment.views(values).items():
            self.replica.parameters[name].copy_(value)

    def _publish(self) -> None:
        entry = min((sent.step - 1 for sent in self._in_flight.values()), default=self.step)
        done = self._phase is Phase.DONE
        failed = frozenset(range(len(self.states)) if done else self._failed)
        self._mailbox.post(Published(self._phase, self.step, entry, tuple(self.states), failed))

    def _event(self, kind: str, **fields: object) -> None:
        self._mailbox.post(Progress({"event": kind, **fields}))

    def _note_loss(self) -> None:
        self._recent.append(self.replica.loss)
        if self.step % self._curve_every == 0 or self.step == self._steps:
            self.tally.curve.append((self.step, sum(self._recent) / len(self._recent)))
            self._recent.clear()

    def _report(self, state: str = "training") -> None:
        now = self._clock()
        if now < self._progress_at and state == "training" and self.step < self._steps:
            return
        self._progress_at = now + _PROGRESS_S
        self._event(
            "progress",
            step=self.step,
            steps=self._steps,
            loss=self.replica.loss,
            round=self.states[0].version,
            state=state,
        )
        if state == "training":
            self._publish()
