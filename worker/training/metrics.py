"""Measures a worker's training, and tells what the train thread says of it meanwhile."""

import heapq
import math
import statistics
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from murmuration.protos.events import EventKind, new_event
from murmuration.worker.membership import Phase
from murmuration.worker.training import mailbox as mail
from murmuration.worker.training.device import device_of, flops_peak, memory_peak
from murmuration.worker.training.fragment import FragmentReplica
from murmuration.worker.training.replica import Pace, Replica

_REMEMBERED_STEPS = 4096
_LONGEST = 5
_CURVE_POINTS = 400
_MOST_VALIDATIONS = 4096
_CURVE_STEPS = 1000  # to a point at most: a run may have no end
_PROGRESS_S = 0.5
_FLOPS = 6  # of a parameter and token, forward and backward, without attention (arXiv:2001.08361)
_PACE_REPORTS = 20  # of progress: what a second brings is told over about ten of them


@dataclass(frozen=True, order=True)
class Stall:
    stall_s: float
    fragment: int
    round: int
    waited_for: str


@dataclass
class Metrics:
    """Counts and seconds of this process's life. train thread only."""

    inner_steps: int = 0
    compute_s: float = 0.0
    stall_s: float = 0.0
    visits_wait_s: float = 0.0  # of a stage, that has nothing to compute until a microbatch comes
    first_step_at: float | None = None
    last_step_at: float | None = None
    rounds_completed: int = 0  # exchanges of a fragment, those of the final mean too
    rounds_failed: int = 0
    final_mean_rounds: int = 0
    final_mean_stall_s: float = 0.0  # of stall_s
    most_overlap_steps: int = 0  # tau at its longest, where it is measured
    put_back: int = 0  # times that parameters, moments or a gradient were not finite
    steps_lost: int = 0  # inner steps that were undone for it
    rounds_given_up: int = 0  # for the state of the other side of a partition
    peak_rss_bytes: int = 0  # of the process, up to the last step
    curve: list[tuple[int, float]] = field(default_factory=list)
    val_curve: list[tuple[int, float]] = field(default_factory=list)  # of the anchors
    stall_s_by_peer: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    _waited_s: tuple[float, float] = (0.0, 0.0)  # up to the last step: for microbatches, for rounds
    _recent: list[float] = field(default_factory=list)
    _stepped_at: float | None = None
    _iterations: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_STEPS))
    _longest: list[Stall] = field(default_factory=list)
    _steps: Mapping[bool, deque[float]] = field(
        default_factory=lambda: {at: deque(maxlen=_REMEMBERED_STEPS) for at in (True, False)}
    )

    @property
    def wall_s(self) -> float:
        if self.first_step_at is None or self.last_step_at is None:
            return 0.0
        return self.last_step_at - self.first_step_at

    @property
    def compute_utilization(self) -> float:
        """Share of that time in forward, backward and inner step."""
        return self.compute_s / self.wall_s if self.wall_s > 0 else 0.0

    def stalled(self, stall: Stall) -> None:
        self.stall_s += stall.stall_s
        self.stall_s_by_peer[stall.waited_for] += stall.stall_s
        heapq.heappush(self._longest, stall)
        if len(self._longest) > _LONGEST:
            heapq.heappop(self._longest)

    def learned(self, loss: float, before: int, step: int, steps: int) -> None:
        """Takes the loss of an inner step from `before` to `step` of `steps`; keeps means."""
        if not math.isnan(loss):  # a stage without a loss of its own
            self._recent.append(loss)
        every = min(_CURVE_STEPS, max(1, steps // _CURVE_POINTS))
        if self._recent and (step // every > before // every or step == steps):
            self.curve.append((step, statistics.fmean(self._recent)))
            self._recent.clear()

    def validated(self, step: int, loss: float) -> None:
        """Takes the held-out loss of the anchors; of very many every other one is kept."""
        self.val_curve.append((step, loss))
        if len(self.val_curve) > _MOST_VALIDATIONS:
            del self.val_curve[1::2]

    def stepped(self, seconds: float, *, in_flight: bool) -> None:
        self.inner_steps += 1
        self.compute_s += seconds
        self._steps[in_flight].append(seconds)
        before = self.first_step_at if self._stepped_at is None else self._stepped_at
        if before is not None and self.last_step_at is not None:
            self._iterations.append(self.last_step_at - before)
        self._stepped_at = self.last_step_at
        self._waited_s = self.visits_wait_s, self.stall_s

    def waits(self) -> dict[str, float]:
        """How long it waited up to the last step (s): for rounds, on a stage for microbatches."""
        visits_s, rounds_s = self._waited_s
        return {"visits_wait_s": round(visits_s, 3), "rounds_wait_s": round(rounds_s, 3)}

    def iterations(self) -> dict[str, float | None]:
        """How long it takes between inner steps, with waits: median, and 95th percentile (s)."""
        ordered = sorted(self._iterations)
        late = ordered[math.ceil(0.95 * len(ordered)) - 1] if ordered else None
        return {"iteration_s": _median(self._iterations), "iteration_p95_s": _short(late, 6)}

    def trained(self) -> None:
        """The last step is done: what follows needs memory of its own."""
        try:
            import resource
        except ImportError:  # no such figure there
            return
        usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self.peak_rss_bytes = usage * (1 if sys.platform == "darwin" else 1024)

    def plain(self) -> dict[str, object]:
        return {
            "wall_s": round(self.wall_s, 3),
            "compute_s": round(self.compute_s, 3),
            "stall_s": round(self.stall_s, 3),
            "compute_utilization": round(self.compute_utilization, 4),
            "rounds_completed": self.rounds_completed,
            "rounds_failed": self.rounds_failed,
            "final_mean_rounds": self.final_mean_rounds,
            "final_mean_stall_s": round(self.final_mean_stall_s, 3),
            "most_overlap_steps": self.most_overlap_steps,
            "rounds_given_up": self.rounds_given_up,
            "steps_lost": self.steps_lost,
            "peak_rss_bytes": self.peak_rss_bytes,
            "stall_s_by_peer": {
                peer: round(stall_s, 3)
                for peer, stall_s in sorted(self.stall_s_by_peer.items())
                if stall_s >= 0.001
            },
            "longest_stalls": [asdict(stall) for stall in sorted(self._longest, reverse=True)],
            "step_s_idle": _median(self._steps[False]),
            "step_s_in_flight": _median(self._steps[True]),
        }


class Reporter:
    """Tells the I/O thread of the training: events, and what is committed. train thread only. Args:
    steps: the run's last step; clock: monotonic seconds."""

    def __init__(
        self,
        mailbox: mail.Mailbox,
        replica: Replica,
        fragments: Sequence[FragmentReplica],
        pace: Pace,
        steps: int,
        clock: Callable[[], float],
    ) -> None:
        self.phase, self.adopts = Phase.READY, 0
        self._mailbox, self._clock = mailbox, clock
        self._replica, self._fragments, self._pace, self._steps = replica, fragments, pace, steps
        self._progress_at = -math.inf
        self._told_steps, self._told_compute_s = 0, 0.0  # up to the last round
        self._rounds = 0
        # Time, step and samples of the latest reports of progress.
        self._seen: deque[tuple[float, int, int]] = deque(maxlen=_PACE_REPORTS)
        self._samples_before = replica.samples or 0
        self._device = device_of(replica.model)
        self._parameters = sum(each.numel() for each in replica.model.parameters())

    def event(self, kind: EventKind, **fields: object) -> None:
        if kind in ("adopted", "skipped"):  # the step has moved otherwise than by training
            self._seen.clear()
        self._mailbox.post(mail.TrainingEvent(new_event(kind, **fields)))

    def publish(self, step: int) -> None:
        """Tells others what is committed at this position in the schedule, to see and fetch."""
        in_flight = (each.in_flight for each in self._fragments if each.in_flight is not None)
        entry = min((sent.step - 1 for sent in in_flight if not sent.everyone), default=step)
        done = self.phase in (Phase.DONE, Phase.LEAVING)
        failed = frozenset(each.fragment.index for each in self._fragments if done or each.failed)
        states = tuple(each.state for each in self._fragments)
        known = (self.phase, step, entry, states, failed, self._pace.step_s, self.adopts)
        self._mailbox.post(mail.Published(*known))

    def progress(self, step: int, state: str = "training") -> None:
        """Reports now and then where the training is, and publishes; other states, always."""
        now = self._clock()
        if now < self._progress_at and state == "training" and step < self._steps:
            return
        self._progress_at = now + _PROGRESS_S
        at = {"step": step, "steps": self._steps, "loss": self._loss, "rounds": self._rounds}
        self.event("progress", **at, state=state, **self._pace_figures(step))
        if state == "training":
            self.publish(step)

    def iteration(self, step: int, visits: int) -> None:
        """The gradient of a stage's iteration is there, the mean over `visits` microbatches."""
        self.event("iteration", iteration=step, visits=visits, loss=self._loss)

    def round_done(
        self, result: mail.RoundDone, work_steps: int, stall_s: float, metrics: Metrics
    ) -> None:
        """A round has come back, for which the training stood still for `stall_s`."""
        steps, compute_s = metrics.inner_steps, metrics.compute_s
        since, since_s = steps - self._told_steps, compute_s - self._told_compute_s
        self._told_steps, self._told_compute_s = steps, compute_s
        self._rounds = metrics.rounds_completed
        self.event(
            "round",
            fragment=result.fragment,
            round=result.round,
            contributors=result.contributors,
            missed=bool(result.missed),
            stall_s=round(stall_s, 4),
            exchange_s=round(result.exchange_s, 4),
            waited_for=result.waited_for,
            work_steps=work_steps,
            steps=since,
            step_s=round(since_s / since, 6) if since else None,
        )

    def round_failed(self, result: mail.RoundFailed) -> None:
        at = {"fragment": result.fragment, "round": result.round, "reason": result.reason}
        self.event("round_failed", **at, waiting_for=list(result.waiting_for))

    def _pace_figures(self, step: int) -> dict[str, object]:
        """The pace of the training: of this process, and each second, waits included. Samples are
        missing where the loop is the user's, tokens where the task does not count in them, and of
        the device what torch or its maker does not tell."""
        replica, samples = self._replica, self._replica.samples
        drawn = (samples or 0) - self._samples_before
        self._seen.append((self._clock(), step, drawn))
        (began_s, *before), (ended_s, *now) = self._seen[0], self._seen[-1]
        steps_per_s, samples_per_s = None, None
        if (seconds := ended_s - began_s) > 0:
            steps_per_s, samples_per_s = (
                (n - b) / seconds for b, n in zip(before, now, strict=True)
            )
        figures: dict[str, object] = {
            "learning_rate": replica.learning_rate,
            "gradient_norm": _short(replica.last_gradient_norm, 6),
            "steps_per_s": _short(steps_per_s),
        }
        if (peak := memory_peak(self._device)) is not None:
            figures["device_memory_bytes"] = peak
        if samples is None:
            return figures
        figures |= {"samples": drawn, "samples_per_s": _short(samples_per_s)}
        if (tokens := replica.tokens_per_sample) is not None:
            per_s = None if samples_per_s is None else samples_per_s * tokens
            figures |= {"tokens": drawn * tokens, "tokens_per_s": _short(per_s)}
            if per_s is not None and (flops := flops_peak(self._device)) is not None:
                figures["mfu"] = round(_FLOPS * self._parameters * per_s / flops, 4)
        return figures

    @property
    def _loss(self) -> float | None:
        return None if math.isnan(self._replica.loss) else self._replica.loss


def _short(value: float | None, decimals: int = 3) -> float | None:
    return None if value is None else round(value, decimals)


def _median(seconds: deque[float]) -> float | None:
    return round(statistics.median(seconds), 6) if seconds else None
