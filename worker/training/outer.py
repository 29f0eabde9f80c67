"""The outer loop of one peer: what it sends, what it waits for, and how each round ends.

A training loop calls `begin_inner_step`, takes the step, and calls `after_inner_step`; the rest
happens there. When a round fails, the local parameters are kept and the anchor waits for another
peer's state. When a round closed without this peer, what it has learned is carried over.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from murmuration.algorithms.diloco import pseudo_gradient
from murmuration.algorithms.fragment_state import Contribution
from murmuration.algorithms.fragments import Fragment
from murmuration.algorithms.noloco import relative_distance
from murmuration.algorithms.plan import Plan
from murmuration.algorithms.schedule import Due, Schedule
from murmuration.worker.membership import Phase
from murmuration.worker.training.device import copies_for
from murmuration.worker.training.fragment import FragmentReplica
from murmuration.worker.training.mailbox import (
    Adopt,
    AllStarted,
    Begin,
    FastestPace,
    IterationOver,
    Mailbox,
    OthersWait,
    PrefetchedAnchor,
    RoundDone,
    RoundFailed,
    SkipAhead,
    StageJob,
    StageMove,
    Started,
    Stop,
    ToTrain,
)
from murmuration.worker.training.metrics import Metrics, Reporter, Stall
from murmuration.worker.training.replica import Pace, Replica
from murmuration.worker.wire import are_finite, is_finite

_AT_ONCE = 2  # rounds on their way where none overlaps a step: the link stays busy
_LAST_TRIES = 2  # of a last round: what an earlier try has sent goes first


class RoundOrder:
    """Whose round it is: what to apply and to send after an inner step, and in which order.

    The schedule says when and how many. With a mean over all, which round it is follows from the
    states' versions, so that a round that came to nothing is made up for at the next occasion. In
    pairs it is the schedule's own, for others do not wait. All peers take the rounds in one order,
    whatever happened to each: otherwise two could wait for each other's fragments crosswise.
    """

    def __init__(
        self, fragments: Sequence[FragmentReplica], plan: Plan, schedule: Schedule
    ) -> None:
        self._fragments, self._plan, self._schedule = fragments, plan, schedule

    def to_apply(self, step: int) -> list[FragmentReplica]:
        """The rounds in flight that have been long enough; at the last step all."""
        last = step == self._schedule.steps
        return [each for each in self.in_flight() if last or self._is_ripe(each, step)]

    def to_send(self, steps: range) -> list[tuple[FragmentReplica, int]]:
        """(fragment, round) of what is due after these steps, which one inner step went over."""
        due = [each for step in steps for each in self._schedule.sends(step)]
        if self._plan.exchange == "pairs":
            latest = {each.fragment: each.round for each in due}
            return [(self._fragments[index], round_) for index, round_ in latest.items()]
        idle = [(each, each.state.version) for each in self._fragments if each.in_flight is None]
        idle.sort(key=lambda turn: self._place(*turn))
        return idle[: len(due)]

    def is_due(self, steps: range) -> bool:
        """Whether something is to be sent or applied after these steps, as far as is known now. A
        round that is late is looked for again after twice as long."""
        if any(self._schedule.sends(step) for step in steps):
            return True
        sent = [each.in_flight.step for each in self._fragments if each.in_flight is not None]
        tau = self._plan.overlap_steps
        late = [step - at - tau for at in sent for step in steps if step - at >= tau]
        return any(each.bit_count() < 2 for each in late)  # 0, 1, 2, 4, 8

    def unsent(self) -> list[FragmentReplica]:
        """Those that have learned what is in no round yet, in the order of the rounds."""
        turns = [(each, each.state.version) for each in self._fragments if each.work_steps]
        return [each for each, _ in sorted(turns, key=lambda turn: self._place(*turn))]

    def in_flight(self) -> list[FragmentReplica]:
        """Those with a round in flight, in the order of the rounds."""
        turns = [(f, f.in_flight.round) for f in self._fragments if f.in_flight is not None]
        return [each for each, _ in sorted(turns, key=lambda turn: self._place(*turn))]

    def _is_ripe(self, each: FragmentReplica, step: int) -> bool:
        if each.in_flight is None:
            return False
        took, plan = step - each.in_flight.step, self._plan
        if plan.overlap == "measured" and each.arrived is None:
            return took >= plan.inner_steps  # it is due again
        return took >= plan.overlap_steps

    def _place(self, each: FragmentReplica, round_: int) -> tuple[int, int]:
        """Where a round stands in the order of all rounds: by its step in an undisturbed run."""
        index = each.fragment.index
        return (self._schedule.send_step(Due(index, round_)), index)


class OuterLoop:
    """What a training loop does between its inner steps. train thread only.

    Args:
        replica: model, inner optimizer and samples.
        fragments, plan, steps: what is exchanged, how, and until when.
        mailbox: the way to the I/O thread.
        clock: monotonic seconds.

    Attributes:
        moved: whether another peer's word has moved the step since the inner step began.
        stopped: why the run ends before the schedule does.
        moves_to: the stage to serve next, where that is why.
    """

    def __init__(
        self,
        *,
        replica: Replica,
        fragments: Sequence[Fragment],
        plan: Plan,
        steps: int,
        mailbox: Mailbox,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._step = self._dealt_with = 0  # the position in the schedule
        self._others_at = 0  # most of them have come so far
        self.moved = False
        self.stopped: Stop | None = None
        self.moves_to: StageMove | None = None
        copies = copies_for(replica.parameters.values())
        self.fragments = [
            FragmentReplica(each, plan, replica.parameters, replica.accessor, copies)
            for each in fragments
        ]
        self.metrics, self.pace = Metrics(), Pace(plan)
        self.reporter = Reporter(mailbox, replica, self.fragments, self.pace, steps, clock)
        self._replica, self._plan, self._steps = replica, plan, steps
        self._mailbox, self._clock = mailbox, clock
        self._schedule = plan.schedule(fragments=len(fragments), steps=steps)
        self._order = RoundOrder(self.fragments, plan, self._schedule)
        self._before, self._loss = 0, math.nan
        self._strides: Iterator[int] = (self._stride() for _ in itertools.count())
        self._told_at_home: set[str] = set()
        specs = [spec for each in fragments for spec in each.specs]
        self._trained = [spec.name for spec in specs if not spec.averaged]
        self._pairs, self._gradients = plan.exchange == "pairs", plan.payload == "gradient"

    @property
    def step(self) -> int:
        """The position in the schedule; another peer's word may move it."""
        return self._step

    @step.setter
    def step(self, position: int) -> None:
        self._step = self._dealt_with = position  # what was due before it is others' affair

    def publish(self) -> None:
        """What is committed, for others to see and fetch."""
        if new := {name for each in self.fragments for name in each.at_home} - self._told_at_home:
            self._told_at_home |= new
            text = f"values that are not finite stay here, of the buffers {', '.join(sorted(new))}"
            self.reporter.event("warning", text=text)
        self.reporter.publish(self.step)

    def prolong(self) -> None:
        """The run goes on beyond what was its last step, after which there were rounds that the
        schedule has not."""
        for each in self.fragments if self.step < self._steps else ():
            due = self._schedule.next_round(each.fragment.index, self.step)
            if each.state.version > due:
                each.renumber(due)

    def begin_again(self) -> None:
        """Sends what was on its way when the state that this goes on from was saved."""
        if self.step:
            self.pace.resumes()
        for each in self._order.in_flight():
            self._post(each)

    # -------------------------------------------------------------------------- around inner steps

    def begin_inner_step(self) -> None:
        """Goes on in the schedule, by as many steps as an inner step counts for here."""
        self._before, self._step = self.step, min(self._steps, self.step + next(self._strides))
        self.moved = False

    def _stride(self) -> int:
        """By the pace; or to where the others wait for this peer, if it has stood still since it
        was last in a round."""
        stride, behind = self.pace.stride(), self._others_at - self.step
        return behind if behind > stride and self.pace.lags(self._clock(), behind) else stride

    def agree_ahead(self) -> tuple[int, ...]:
        """Settles how far each inner step goes in the schedule, whatever the pace, until the first
        after which a round is due: other processes of the site count along."""
        strides: list[int] = []
        position, over = self.step, self.step >= self._steps
        while not over and len(strides) < self._plan.inner_steps:
            went = min(self.pace.stride() if strides else self._stride(), self._steps - position)
            strides.append(went)
            position += went
            over = self._order.is_due(range(position - went + 1, position + 1))
        self._strides = itertools.chain(strides, itertools.repeat(1))
        return tuple(strides)

    def undo_inner_step(self) -> None:
        """The step that had begun is not taken."""
        self._step = self._before

    def after_inner_step(self, loss: float, *, exchange: bool = True) -> None:
        """Applies and sends what is due, and handles what has come.

        Args:
            loss: of the step; NaN on a stage without one.
            exchange: False where no parameter may move now: the next step makes up for what is due.
        """
        for each in self.fragments:
            each.work_steps += 1
        self.metrics.learned(loss, self._before, self.step, self._steps)
        if exchange and self._led_astray(loss) and self._plan.exchange != "none":
            self._put_back()
        if self._gradients:
            self.commit_parameters()
        elif not exchange:
            return
        elif self._plan.exchange != "none":
            if self._plan.overlap == "measured":
                self._handle_all()  # what has come is applied now
            self._exchange()
        self._handle_all()
        self._take_head_starts()

    def _led_astray(self, loss: float) -> bool:
        """Whether a loss is the first that is not finite; the parameters may be so, too."""
        before, self._loss = self._loss, loss
        return math.isfinite(before) and not math.isfinite(loss)

    def _handle_all(self) -> None:
        while (message := self._mailbox.poll()) is not None:
            self.handle(message)

    def exchange_gradients(self, gradients: dict[str, Tensor], weight: int) -> None:
        """In a plan that exchanges gradients, before the inner step: replaces them by their mean
        over the group; keeps them where a round fails.

        Args:
            gradients: by parameter.
            weight: of a stage, the microbatches that they are the mean of; else 1.
        """
        if not self._gradients or self._plan.exchange == "none":
            return
        if not are_finite(gradients[name] for name in self._trained):
            self._report_lost(self.fragments, 1)
            # It counts for nothing, and this peer takes the mean of the others'.
            gradients |= {name: torch.zeros_like(gradients[name]) for name in self._trained}
            weight = 0
        for each in self.fragments:
            self._begin_round(each, each.shared(gradients), weight)
        for each in self.fragments:
            result = self._await_round(each)
            if result is not None:
                each.apply_gradients(result)
                gradients.update(each.take_shared(gradients, each.fragment.views(result.mean)))

    def commit_parameters(self) -> None:
        """Without an outer optimizer the anchor is the local model."""
        if self._gradients:
            self._put_back()
        for each in self.fragments:
            each.commit(anchor=each.local)
        self.publish()

    def apply_in_flight(self) -> None:
        """Waits for the rounds that were sent, and applies them: this peer sends no more."""
        self._put_back()
        for each in self._order.in_flight():
            self._apply(each)

    def send_last_rounds(self) -> None:
        """Before the schedule's end: one more round of what was learned since the last. What no
        round takes stays in the local parameters, and in `work_steps`."""
        self.apply_in_flight()
        for _ in range(0 if self._gradients else _LAST_TRIES):
            for each in self._order.unsent():
                self._apply_all_but(_AT_ONCE - 1)
                if self.stopped is not None or any(f.failed for f in self.fragments):
                    break
                if self._pairs:
                    next_round = self._schedule.next_round(each.fragment.index, self.step)
                    each.skip_to(max(each.state.version, next_round))
                self._send(each)
            self._apply_all_but(0)

    @property
    def unsent_steps(self) -> int:
        """Inner steps that are in no round yet, of the fragment with most of them."""
        return 0 if self._gradients else max(each.work_steps for each in self.fragments)

    def average_replicas(self, *, early: bool = False) -> None:
        """After the last step: one anchor for all, the mean of everyone's. Where replicas keep what
        they have not sent, or a last round has failed, a peer gives its local parameters.

        Args: early: all loops have ended before the schedule, so that the round has another number.
        """
        self._put_back()
        for each in self.fragments:
            self._apply_all_but(_AT_ONCE - 1)  # what is on its way takes memory
            index = each.fragment.index
            end = self._steps if early else self._schedule.rounds(index)
            if self.stopped is not None:
                break
            if each.state.version > end:
                continue  # taken over from peers that had agreed: it is the mean already
            if self._pairs or early:
                each.skip_to(end)
            unsent = self._plan.keeps or each.work_steps > 0
            values = each.local if unsent else each.state.anchor
            sent = each.contribute_values(values, self.step)
            self.publish()
            group = () if self._pairs else each.state.group
            self._mailbox.post(Begin(index, sent.round, group, sent.values, everyone=True))
        self._apply_all_but(0)

    # ----------------------------------------------------------------- rounds of pseudo-gradients

    def _exchange(self) -> None:
        """Applies what is due, then sends what is due since the last call."""
        to_apply = self._order.to_apply(self.step)
        due = range(self._dealt_with + 1, self.step + 1)
        if to_apply or self._order.to_send(due):
            self._put_back()
        for each in to_apply:
            self._apply(each)
        at_once = self._schedule.applies_at_once(self.step)
        self._dealt_with = self.step
        for each, round_ in self._order.to_send(due):
            if self._pairs:  # a round is the schedule's: others do not wait for it
                self._apply(each)
                each.skip_to(round_)
            elif at_once:  # what is on its way takes memory
                self._apply_all_but(_AT_ONCE - 1)
                if each.in_flight is not None or each.state.version != round_:
                    continue  # another peer's state has come meanwhile
            self._send(each)
        if at_once:
            applied = self._order.in_flight()
            for each in applied:
                self._apply(each)
            for each in applied:  # anchors go ahead when no round is on its way any more
                self._await_next_anchor(each)

    def hand_in(self, timeout_s: float) -> None:
        """Stopped before the last step: what this peer has learned since its last contribution
        goes into the next round of the others. Returns when their reducers have it, with what was
        on its way before; or after the time-out. Nothing is applied any more."""
        means = self._plan.exchange == "mean" and not self._gradients
        if not means or self.reporter.phase is not Phase.TRAINING:
            return
        for each in self._order.unsent():
            if each.in_flight is None and not each.failed and each.is_finite:
                self._send(each, leaves=True)
        deadline = self._clock() + timeout_s
        sent = {each.fragment.index: each.in_flight for each in self._order.in_flight()}
        while sent and (left_s := deadline - self._clock()) > 0:
            match self._mailbox.wait(left_s):
                case RoundDone() | RoundFailed() as end if given := sent.pop(end.fragment, None):
                    counts = end.handed_in if isinstance(end, RoundFailed) else not end.missed
                    if counts and given.round == end.round:
                        where = {"fragment": end.fragment, "round": end.round}
                        self.reporter.event("handed_in", **where, steps=given.work_steps)
                case Stop(error=error) if error is not None:
                    break

    def _send(self, each: FragmentReplica, *, leaves: bool = False) -> None:
        start = each.as_held(each.start)
        local = each.local
        g = pseudo_gradient(start, local, out=local)
        if not is_finite(g):  # in a shard that another process of the site holds
            self._put_back([each])
            g = pseudo_gradient(start, each.local)
        self._begin_round(each, g, leaves=leaves)

    def _put_back(self, known: Sequence[FragmentReplica] = ()) -> None:
        """Puts back all fragments that are not finite, to where this peer's last contribution has
        left them, and forgets the moments, in which the same lives on. Others wait for this peer:
        no movement is a better answer than none.

        Args:
            known: those that are not finite; else this finds them.
        """
        found = known or [each for each in self.fragments if not each.is_finite]
        if found or not self._replica.moments_are_finite:
            steps = max((each.put_back() for each in found), default=0)
            self._replica.reset_moments()
            self._report_lost(found, steps)

    def _report_lost(self, fragments: Sequence[FragmentReplica], steps: int) -> None:
        """Counts inner steps that are lost, and tells of the first, second, fourth such time."""
        metrics = self.metrics
        metrics.steps_lost += steps
        metrics.put_back += 1
        if metrics.put_back & (metrics.put_back - 1) == 0:
            self.reporter.event(
                "put_back",
                step=self.step,
                fragments=[each.fragment.index for each in fragments],
                steps=steps,
                steps_lost=metrics.steps_lost,
                times=metrics.put_back,
            )

    def _apply(self, each: FragmentReplica) -> None:
        """Waits for a round that was sent, if one was, and applies its mean."""
        sent, result = each.in_flight, self._await_round(each)
        if sent is None or result is None:
            return
        if sent.everyone:
            each.write(each.apply_final_average(result))
            each.work_steps = 0  # what no round had is in it
        else:
            each.finish(result)
        self.publish()

    def _apply_all_but(self, last: int) -> None:
        """Applies the rounds in flight, in their order, but for this many of the last."""
        in_flight = self._order.in_flight()
        for each in in_flight[: max(0, len(in_flight) - last)]:
            self._apply(each)

    def _begin_round(
        self, each: FragmentReplica, g: Tensor, weight: int | None = None, *, leaves: bool = False
    ) -> Contribution:
        sent = each.contribute(g, self.step)
        self.publish()
        self._post(each, weight, leaves=leaves)
        return sent

    def _post(
        self, each: FragmentReplica, weight: int | None = None, *, leaves: bool = False
    ) -> None:
        sent, state = each.in_flight, each.state
        assert sent is not None, "it was contributed"
        if weight is None:
            weight = max(1, min(sent.work_steps, self._plan.inner_steps))
        anchor = state.anchor if self._pairs else None
        index, values = each.fragment.index, sent.values
        self._mailbox.post(
            Begin(index, sent.round, state.group, values, anchor, weight=weight, leaves=leaves)
        )

    def _await_round(self, each: FragmentReplica) -> RoundDone | None:
        """The result of a round in flight; None when there is none, or it came to nothing."""
        sent, index = each.in_flight, each.fragment.index
        if sent is None:
            return None
        started = self._clock()
        if each.arrived is None:
            self.reporter.progress(self.step, state="waiting")
        while each.in_flight_round == sent.round and each.arrived is None and self.stopped is None:
            self.handle(self._mailbox.wait())
        stall_s = self._clock() - started
        if sent.everyone:
            self.metrics.final_mean_stall_s += stall_s
        self._note_overlap(sent)
        result = each.take_result() if each.in_flight_round == sent.round else None
        if result is None:
            # Another peer's state took its place, or the run is stopping.
            self.metrics.stalled(Stall(stall_s, index, sent.round, "?"))
            return None
        if isinstance(result, RoundFailed):
            waited_for = ",".join(result.waiting_for) or "?"
            self.metrics.stalled(Stall(stall_s, index, sent.round, waited_for))
            self._abandon(each, result)
            return None
        self.metrics.stalled(Stall(stall_s, index, sent.round, result.waited_for))
        self.metrics.rounds_completed += 1
        self.pace.round_closed(self._clock(), counted=not result.missed)
        self.metrics.final_mean_rounds += sent.everyone
        self.reporter.round_done(result, sent.work_steps, stall_s, self.metrics)
        return result

    def _note_overlap(self, sent: Contribution) -> None:
        """How long a round was on its way, where that is left to it."""
        if self._plan.overlap == "measured" and not self._schedule.applies_at_once(self.step):
            took = self.step - sent.step
            self.metrics.most_overlap_steps = max(self.metrics.most_overlap_steps, took)

    def _abandon(self, each: FragmentReplica, result: RoundFailed) -> None:
        """A round of this peer's has come to nothing: local parameters are kept."""
        local = each.abandon(result.counted, result.error, each.local)
        if local is not None and not self._gradients:
            each.write(local)
        self.metrics.rounds_failed += 1
        self.reporter.round_failed(result)
        self.publish()

    # -------------------------------------------------------------------------- anchors, in pairs

    def _await_next_anchor(self, each: FragmentReplica) -> None:
        """Waits for the anchors of the next round's group, as soon as they can come. Steps that
        undo what a replica is apart by would undo it twice with a head start after them."""
        index, round_ = each.fragment.index, each.state.version
        if not self._plan.shared_momentum or round_ >= self._schedule.rounds(index):
            return
        started = self._clock()
        while not each.knows_next_anchor and each.state.version == round_ and self.stopped is None:
            self.handle(self._mailbox.wait())
        self.metrics.stalled(Stall(self._clock() - started, index, round_, "anchors"))

    def _take_head_starts(self) -> None:
        """Goes on from the mean of the next group's anchors, where all of them are here."""
        for each in (f for f in self.fragments if f.knows_next_anchor):
            if each.take_head_start():
                index, round_ = each.fragment.index, each.state.version
                self.reporter.event("head_start", fragment=index, round=round_, step=self.step)

    # --------------------------------------------------------------------------- from the mailbox

    def handle(self, message: ToTrain | None) -> None:
        """Acts on a message of the I/O thread."""
        match message:
            case RoundDone() | RoundFailed() | PrefetchedAnchor():
                self.fragments[message.fragment].handle(message)
            case Adopt():
                self._adopt(message)
            case FastestPace(fastest_s):
                self.pace.fastest_s = fastest_s
            case OthersWait(step):
                self._others_at = step
            case SkipAhead(step):
                self._skip_ahead(step)
            case StageJob() | IterationOver():
                self._replica.handle(message)
            case StageMove(stage):
                self.moves_to, self.stopped = message, Stop(f"moves to stage {stage}")
            case Stop():
                self.stopped = message
            case Started() | AllStarted() | None:
                pass

    def _adopt(self, adopt: Adopt) -> None:
        """Takes over another peer's committed states; own progress against the anchor is kept."""
        self._put_back()
        taken, phase = [], self.reporter.phase
        lost, kept, apart = 0, 0, 0.0
        for index, theirs in sorted(adopt.states.items()):
            each = self.fragments[index]
            # Before the start the others' group wins: theirs is the run under way.
            joining = phase is Phase.READY and theirs.version >= each.state.version
            replaced = index in adopt.replaced and theirs.hash != each.state.hash
            if theirs.version > each.state.version or joining or replaced:
                rounds, before = adopt.given_up.get(index, 0), each.work_steps
                if rounds:
                    lost = max(lost, rounds)
                    values = slice(each.fragment.elements - each.fragment.exact)
                    distance = relative_distance(each.state.anchor[values], theirs.anchor[values])
                    apart = max(apart, distance)
                each.take_over(theirs, keep=not self._gradients, me=adopt.me, lost=rounds)
                kept = max(kept, each.work_steps - before)
                taken.append(index)
        if not taken:
            return
        self.pace.took_over()
        if phase is Phase.TRAINING:
            self.pace.round_closed(self._clock(), counted=False)
        self.metrics.rounds_given_up += lost
        if len(adopt.states) == len(self.fragments):
            # All of the other's state belongs to a step of its schedule, even an earlier one than
            # this peer's: else the two would wait for each other's rounds crosswise from now on.
            self.step = adopt.step if phase in (Phase.READY, Phase.TRAINING) else self.step
            self.moved = True
            for each in self.fragments:
                each.reposition(self.step)
        self.reporter.event(
            "adopted",
            donor=adopt.donor,
            fragments=taken,
            step=self.step,
            reason=adopt.reason,
            confirmed_by=list(adopt.confirmed_by),
            rounds_given_up=lost,
            kept_steps=kept,
            apart=apart,
        )
        self.publish()

    def _skip_ahead(self, step: int) -> None:
        """Goes on where the others are in the schedule; rounds on their way are over for them."""
        if step <= self.step:
            return
        self.step, self.moved = min(step, self._steps - 1), True
        for each in self.fragments:
            each.skip_to(self._schedule.next_round(each.fragment.index, self.step))
        self.publish()
        self.reporter.event("skipped", step=self.step, reason="the others had gone on")
