"""The outer loop of one peer: what it sends, what it waits for, and how each round ends.

A training loop says when an inner step begins, takes it, and calls `after_inner_step`; the rest
happens there. When a round fails, the local parameters are kept and the anchor waits for another
peer's state. When a round closed without this peer, what it has learned is carried over.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from murmuration.algorithms.fragments import Fragment
from murmuration.algorithms.noloco import relative_distance
from murmuration.algorithms.plan import Plan
from murmuration.algorithms.schedule import Due, Schedule
from murmuration.worker.membership import Phase
from murmuration.worker.training import mailbox as mail
from murmuration.worker.training.fragment import FragmentReplica
from murmuration.worker.training.metrics import Metrics, Reporter, Stall
from murmuration.worker.training.replica import Pace, Replica
from murmuration.worker.wire import are_finite, is_finite

_AT_ONCE = 2  # rounds on their way where none overlaps a step: the link stays busy
_LAST_TRIES = 2  # of a last round: what an earlier try has sent goes first


class RoundOrder:
    """The order of rounds: what to apply and to send after an inner step.

    The schedule says when and how many. With a mean over all, which round it is follows from the
    states' versions, so that a round that came to nothing is made up for at the next occasion. In
    pairs it is the schedule's own, for others do not wait. All peers take the rounds in one order,
    whatever happened to each: otherwise two could wait for each other's fragments crosswise."""

    def __init__(
        self, fragments: Sequence[FragmentReplica], plan: Plan, schedule: Schedule
    ) -> None:
        self._fragments, self._plan, self._schedule = fragments, plan, schedule

    def to_apply(self, step: int) -> list[FragmentReplica]:
        """The rounds in flight that have been long enough; at the last step all."""
        found, plan = [], self._plan
        for each in self.in_flight():
            assert each.in_flight is not None
            late = plan.overlap == "measured" and each.arrived is None  # until it is due again
            least = plan.inner_steps if late else plan.overlap_steps
            if step == self._schedule.steps or step - each.in_flight.step >= least:
                found.append(each)
        return found

    def to_send(self, steps: range) -> list[tuple[FragmentReplica, int]]:
        """(fragment, round) of what is due after these steps, which one inner step went over."""
        due = [each for step in steps for each in self._schedule.sends(step)]
        if self._plan.exchange == "pairs":
            latest = {each.fragment: each.round for each in due}
            return [(self._fragments[index], round_) for index, round_ in latest.items()]
        idle = ((each, each.state.version) for each in self._fragments if each.in_flight is None)
        return self._in_order(idle)[: len(due)]

    def is_due(self, steps: range) -> bool:
        """Tells whether something is to be sent or applied after these steps, as far as is known
        now. A round that is late is looked for again after twice as long."""
        if any(self._schedule.sends(step) for step in steps):
            return True
        sent = [each.in_flight.step for each in self._fragments if each.in_flight is not None]
        tau = self._plan.overlap_steps
        late = [step - at - tau for at in sent for step in steps if step - at >= tau]
        return any(each.bit_count() < 2 for each in late)  # 0, 1, 2, 4, 8

    def unsent(self) -> list[FragmentReplica]:
        """Those that have learned what is in no round yet, in the order of the rounds."""
        turns = ((each, each.state.version) for each in self._fragments if each.work_steps)
        return [each for each, _ in self._in_order(turns)]

    def in_flight(self) -> list[FragmentReplica]:
        """Those with a round in flight, in the order of the rounds."""
        turns = ((f, f.in_flight.round) for f in self._fragments if f.in_flight is not None)
        return [each for each, _ in self._in_order(turns)]

    def _in_order(
        self, turns: Iterable[tuple[FragmentReplica, int]]
    ) -> list[tuple[FragmentReplica, int]]:
        """Sorted by the step that each round has in an undisturbed run."""

        def place(turn: tuple[FragmentReplica, int]) -> tuple[int, int]:
            index = turn[0].fragment.index
            return self._schedule.send_step(Due(index, turn[1])), index

        return sorted(turns, key=place)


class OuterLoop:
    """The work of a training loop between its inner steps. train thread only.

    Args: replica: model, inner optimizer and samples; clock: monotonic seconds; between_steps:
    called with the loop after each step of a `Trainer`. Attributes: moved: whether another peer's
    word has moved the step since the inner step began; stopped: why the run ends before the
    schedule does; moves_to: the stage to serve next, where that is why."""

    def __init__(
        self,
        *,
        replica: Replica,
        fragments: Sequence[Fragment],
        plan: Plan,
        steps: int,
        mailbox: mail.Mailbox,
        between_steps: Callable[[Any], None] = lambda loop: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._step = self._dealt_with = 0  # the position in the schedule
        self._others_at = 0  # most of them have come so far
        self.moved = False
        self.stopped: mail.Stop | None = None
        self.moves_to: mail.StageMove | None = None
        self.fragments = [
            FragmentReplica(each, plan, replica.parameters, replica.accessor) for each in fragments
        ]
        self.metrics, self.pace = Metrics(), Pace(plan)
        self.reporter = Reporter(mailbox, replica, self.fragments, self.pace, steps, clock)
        self.replica, self._plan, self._steps = replica, plan, steps
        self._mailbox, self._clock, self._between_steps = mailbox, clock, between_steps
        self._schedule = plan.schedule(fragments=len(fragments), steps=steps)
        self._order = RoundOrder(self.fragments, plan, self._schedule)
        self._before, self._loss, self._averaging_s = 0, math.nan, 0.0
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
        if new := {name for each in self.fragments for name in each.at_home} - self._told_at_home:
            self._told_at_home |= new
            text = f"values that are not finite stay here, of the buffers {', '.join(sorted(new))}"
            self.reporter.event("warning", text=text)
        self.reporter.publish(self.step)

    def prolong(self) -> None:
        """Renumbers rounds after what was the last step: the run goes on beyond it."""
        for each in self.fragments if self.step < self._steps else ():
            due = self._schedule.next_round(each.fragment.index, self.step)
            if each.state.version > due:
                each.renumber(due)

    def _stride(self) -> int:
        """Steps by the pace; or to where the others wait for this peer, if it has stood still."""
        stride, behind = self.pace.stride(), self._others_at - self.step
        return behind if behind > stride and self.pace.lags(self._clock(), behind) else stride

    def agree_ahead(self) -> tuple[int, ...]:
        """How far inner steps go in the schedule until a round is due, for all of the site."""
        strides: list[int] = []
        position, over = self.step, self.step >= self._steps
        while not over and len(strides) < self._plan.inner_steps:
            went = min(self.pace.stride() if strides else self._stride(), self._steps - position)
            strides.append(went)
            position += went
            over = self._order.is_due(range(position - went + 1, position + 1))
        self._strides = itertools.chain(strides, itertools.repeat(1))
        return tuple(strides)

    def after_inner_step(self, loss: float, *, exchange: bool = True) -> None:
        """Applies and sends what is due, and handles what has come. Args: loss: NaN on a stage
        without; exchange: False where no parameter may move now: the next step makes up for it."""
        for each in self.fragments:
            each.work_steps += 1
        self.metrics.learned(loss, self._before, self.step, self._steps)
        if exchange:  # the first loss that is not finite: the parameters may be so, too
            before, self._loss = self._loss, loss
            led_astray = math.isfinite(before) and not math.isfinite(loss)
            if led_astray and self._plan.exchange != "none":
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
        for each in (f for f in self.fragments if f.knows_next_anchor):
            if each.take_early_start():
                index, round_ = each.fragment.index, each.state.version
                self.reporter.event("early_start", fragment=index, round=round_, step=self.step)

    def _handle_all(self) -> None:
        while (message := self._mailbox.poll()) is not None:
            self.handle(message)

    def average_gradients(self, gradients: dict[str, Tensor], weight: int = 1) -> None:
        """In a plan that exchanges gradients, after the backward pass: replaces them by their mean
        over the group; keeps them where a round fails. Args: weight: of a stage, the microbatches
        that they are the mean of; else 1."""
        if not self._gradients or self._plan.exchange == "none":
            return
        began_s = self._clock()
        if not are_finite(gradients[name] for name in self._trained):
            self._report_lost(self.fragments, 1)
            # It counts for nothing, and this peer takes the mean of the others'.
            gradients |= {name: torch.zeros_like(gradients[name]) for name in self._trained}
            weight = 0
        for each in self.fragments:
            self._begin_round(each, each.shared(gradients), weight)
        for each in self.fragments:
            if (result := self._await_round(each)) is not None:
                each.apply_gradients(result)
                gradients.update(each.take_shared(gradients, each.fragment.views(result.mean)))
        self._averaging_s = self._clock() - began_s

    def commit_parameters(self) -> None:
        """Makes the local model the anchor, without an outer optimizer."""
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
        """Before the schedule's end: one more round of what was learned since the last. What none
        takes stays in the local parameters, and in `work_steps`."""
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
        """Agrees after the last step on one anchor for all, the mean of everyone's. Where replicas
        keep what they have not sent, or a last round has failed, a peer gives its local parameters.
        Args: early: all loops have ended before the schedule: the round has another number."""
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
            begin = mail.Begin(index, sent.round, group, sent.values, everyone=True)
            self._mailbox.post(begin)
        self._apply_all_but(0)

    def _exchange(self) -> None:
        """Applies what is due, then sends what is due since the last call."""
        to_apply, due = self._order.to_apply(self.step), range(self._dealt_with + 1, self.step + 1)
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
        """Stopped before the last step, gives what this peer has learned since its last
        contribution to the next round of the others. Returns when their reducers have it, with what
        was on its way before; or after the time-out. Nothing is applied any more."""
        means = self._plan.exchange == "mean" and not self._gradients
        if not means or self.reporter.phase is not Phase.TRAINING:
            return
        for each in self._order.unsent():
            if each.in_flight is None and not each.failed and each.is_finite:
                self._send(each, leaves=True)
        deadline = self._clock() + timeout_s
        sent = {each.fragment.index: each.in_flight for each in self._order.in_flight()}
        while sent and (left_s := deadline - self._clock()) > 0:
            end = self._mailbox.wait(left_s)
            if isinstance(end, mail.Stop) and end.error is not None:
                break
            if not isinstance(end, mail.RoundDone | mail.RoundFailed):
                continue
            others = not isinstance(end, mail.RoundDone) or end.contributors > 1
            counts = end.handed_in if isinstance(end, mail.RoundFailed) else not end.missed
            given = sent.pop(end.fragment, None)
            if given is not None and counts and others and given.round == end.round:
                where = {"fragment": end.fragment, "round": end.round}
                self.reporter.event("handed_in", **where, steps=given.work_steps)

    def _send(self, each: FragmentReplica, *, leaves: bool = False) -> None:
        g = each.learned()
        if not is_finite(g):  # in a shard that another process of the site holds
            self._put_back([each])
            g = each.learned()
        self._begin_round(each, g, leaves=leaves)

    def _put_back(self, known: Sequence[FragmentReplica] = ()) -> None:
        """Puts back all fragments that are not finite, or those `known` to be, to where this peer's
        last contribution has left them. Forgets the moments, in which the same lives on. Others
        wait for this peer: no movement is a better answer than none."""
        found = known or [each for each in self.fragments if not each.is_finite]
        if found or not self.replica.moments_are_finite:
            steps = max((each.put_back() for each in found), default=0)
            self.replica.reset_moments()
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
    ) -> None:
        each.contribute(g, self.step)
        self.publish()
        self._post(each, weight, leaves=leaves)

    def _post(
        self, each: FragmentReplica, weight: int | None = None, *, leaves: bool = False
    ) -> None:
        sent, state, index = each.in_flight, each.state, each.fragment.index
        assert sent is not None, "it was contributed"
        if weight is None:
            weight = max(1, min(sent.work_steps, self._plan.inner_steps))
        values, anchor = sent.values, state.anchor if self._pairs else None
        begin = mail.Begin(index, sent.round, state.group, values, anchor, False, weight, leaves)
        self._mailbox.post(begin)

    def _await_round(self, each: FragmentReplica) -> mail.RoundDone | None:
        """The result of a round in flight; None when there is none, or it came to nothing."""
        sent, metrics = each.in_flight, self.metrics
        if sent is None:
            return None
        started = self._clock()
        if each.arrived is None:
            self.reporter.progress(self.step, state="waiting")
        while each.in_flight_round == sent.round and each.arrived is None and self.stopped is None:
            self.handle(self._mailbox.wait())
        stall_s = self._clock() - started
        if sent.everyone:
            metrics.final_mean_stall_s += stall_s
        if self._plan.overlap == "measured" and not self._schedule.applies_at_once(self.step):
            metrics.most_overlap_steps = max(metrics.most_overlap_steps, self.step - sent.step)
        # Another peer's state took its place, or the run stops.
        result, waited_for = None, "nobody known"
        if each.in_flight_round == sent.round:
            result, each.arrived = each.arrived, None
        if isinstance(result, mail.RoundFailed):
            waited_for = ",".join(result.waiting_for) or waited_for
        elif result is not None:
            waited_for = result.waited_for
        metrics.stalled(Stall(stall_s, each.fragment.index, sent.round, waited_for))
        if isinstance(result, mail.RoundFailed):  # the local parameters are kept
            local = each.abandon(result.counted, result.error, each.local)
            if local is not None and not self._gradients:
                each.write(local)
            metrics.rounds_failed += 1
            self.reporter.round_failed(result)
            self.publish()
            return None
        if result is not None:
            metrics.rounds_completed += 1
            self.pace.round_closed(self._clock(), counted=not result.missed)
            metrics.final_mean_rounds += sent.everyone
            self.reporter.round_done(result, sent.work_steps, stall_s, metrics)
        return result

    def _await_next_anchor(self, each: FragmentReplica) -> None:
        """In pairs, waits for the next group's anchors as soon as they can come: steps that undo
        what a replica is apart by would undo it twice with an early start after them."""
        index, round_ = each.fragment.index, each.state.version
        if not self._plan.shared_momentum or round_ >= self._schedule.rounds(index):
            return
        started = self._clock()
        while not each.knows_next_anchor and each.state.version == round_ and self.stopped is None:
            self.handle(self._mailbox.wait())
        self.metrics.stalled(Stall(self._clock() - started, index, round_, "anchors"))

    def handle(self, message: mail.ToTrain | None) -> None:
        match message:
            case mail.RoundDone() | mail.RoundFailed() | mail.PrefetchedAnchor():
                self.fragments[message.fragment].handle(message)
            case mail.Adopt():
                self._adopt(message)
            case mail.FastestPace(fastest_s):
                self.pace.fastest_s = fastest_s
            case mail.OthersWait(step):
                self._others_at = step
            case mail.SkipAhead(step):
                self._skip_ahead(step)
            case mail.StageJob() | mail.IterationOver():
                self.replica.handle(message)
            case mail.StageMove(stage):
                self.moves_to, self.stopped = message, mail.Stop(f"moves to stage {stage}")
            case mail.Stop():
                self.stopped = message
            case mail.Started() | mail.AllStarted() | None:
                pass

    def _adopt(self, adopt: mail.Adopt) -> None:
        """Takes over another peer's committed states; own progress against the anchor is kept."""
        self._put_back()
        self.reporter.adopts += 1
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
            self.publish()
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
        if step <= self.step:
            return
        self.step, self.moved = min(step, self._steps - 1), True
        for each in self.fragments:
            each.skip_to(self._schedule.next_round(each.fragment.index, self.step))
        self.publish()
        self.reporter.event("skipped", step=self.step, reason="the others had gone on")
