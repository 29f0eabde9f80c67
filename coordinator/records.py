"""Keeps what is known of each worker from its events, whichever way they came."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from murmuration.protos import events
from murmuration.protos.events import Curve, Event, int_of, text_of
from murmuration.protos.exit_codes import exit_words
from murmuration.worker.views.summary import PeerSummary

SILENT_AFTER_S = 10.0  # workers report about twice a second while they train
ENDING = ("settling", "assembling", "evaluating")  # states reported once, however long
# Of a worker that says nothing of them they are null in reports.
COUNTS = ("bytes_sent", "bytes_received", "rounds_completed", "rounds_failed", "steps_lost")
_MAX_CURVE_POINTS = _MAX_FRAGMENTS = _MAX_UNCONFIRMED = 4096
_MAX_LOCATED = 1024
_MAX_WARNINGS = 64


@dataclass
class Record(PeerSummary):
    """One worker, as last heard. Counts are of its current life, but for `moves` and `rebuilds`:
    with a move a life ends. Times are monotonic seconds of this process."""

    state: str = "starting"
    rounds_completed: int | None = 0
    rounds_failed: int | None = 0
    steps_lost: int | None = 0  # since something was not finite
    bytes_sent: int | None = 0
    bytes_received: int | None = 0
    moves: int = 0  # to another stage
    rebuilds: int = 0  # of a stage, after such a move
    started: bool = False
    heard_s: float = 0.0
    # Negative for a signal; None while the process runs or when nobody here could see it end.
    exit_code: int | None = None
    # The worker's own final event, whose figures then count.
    result: dict[str, object] | None = None
    curve: Curve = field(default_factory=list)  # the training loss as seen in progress
    val_curve: Curve = field(default_factory=list)
    located: dict[tuple[str, ...], dict[str, object]] = field(default_factory=dict)  # by place
    warnings: dict[str, None] = field(default_factory=dict)
    _last_round: dict[int, int] = field(default_factory=dict)
    _last_failed: dict[int, int] = field(default_factory=dict)
    _last_move: tuple[int | None, int | None] | None = None
    _rebuilt_after: int | None = None  # the number of moves at the last rebuild
    _unconfirmed: dict[tuple[int, str], int] = field(default_factory=dict)

    def apply(self, event: Event, now_s: float) -> None:
        """Takes one event. The same event again changes nothing; unknown ones are passed over."""
        self.heard_s = now_s
        match event.get("event"):
            case "listening":
                self.address = text_of(event, "address") or self.address
            case "started":
                self.started = True
            case "progress" if self.result is None:
                self._progress(event)
            case "validation":
                if (loss := events.float_of(event, "val_loss")) is not None:
                    self.val_loss = loss
                    _extend(self.val_curve, int_of(event, "step"), loss)
            case "round" if _is_later(self._last_round, event):
                self.rounds_completed = (self.rounds_completed or 0) + 1
            case "round_failed" if _is_later(self._last_failed, event):
                self.rounds_failed = (self.rounds_failed or 0) + 1
            case "put_back":
                self.steps_lost = max(self.steps_lost or 0, int_of(event, "steps_lost") or 0)
            case "moves":  # nobody goes the same way twice in a row: then it is the same event
                move = int_of(event, "stage"), int_of(event, "to")
                self.moves += move != self._last_move
                self._last_move = move
            case "rebuilt" if self._rebuilt_after != self.moves:
                self._rebuilt_after = self.moves
                self.rebuilds += 1
            case "unconfirmed" | "confirmed" as kind:  # visits of an iteration, by a replica
                key = int_of(event, "iteration") or 0, text_of(event, "replica") or ""
                if kind == "confirmed":
                    self._unconfirmed.pop(key, None)
                elif len(self._unconfirmed) < _MAX_UNCONFIRMED:
                    self._unconfirmed[key] = len(events.names_of(event, "microbatches"))
            case "located":
                verdict = event.get("verdict")
                if isinstance(verdict, Mapping) and len(self.located) < _MAX_LOCATED:
                    self.located[events.place_of(verdict)] = dict(verdict)
            case "warning":
                self.warn([text_of(event, "text") or "?"])
            case "result":
                self._finish(event)
            case "exit":
                self.exit_code = int_of(event, "exit_code")

    def warn(self, texts: Iterable[str]) -> None:
        for text in texts:
            if len(self.warnings) < _MAX_WARNINGS:
                self.warnings[text] = None

    @property
    def unconfirmed(self) -> int:
        """Visits of this worker's microbatches that a replica had counted when it fell silent; none
        once the worker has reported, for then it has counted those that were lost."""
        return 0 if self.result is not None else sum(self._unconfirmed.values())

    def seen(self, now_s: float) -> PeerSummary:
        """As it is shown: by how it ended, or how long it has been silent."""
        state, silence_s = self.state, now_s - self.heard_s
        talks = self.started and self.result is None and self.state not in ENDING
        if self.exit_code is not None:
            state = exit_words(self.exit_code)
        elif talks and silence_s > SILENT_AFTER_S:
            state = f"silent {silence_s:.0f} s"
        return replace(self, state=state, answers=True)

    def loss_curve(self) -> Curve:
        """The worker's own curve once it has reported, else what was seen in its progress."""
        return events.curve_of(self.result or {}, "train_loss_curve") or self.curve

    def validation_curve(self) -> Curve:
        """The same for the anchor's held-out loss."""
        return events.curve_of(self.result or {}, "val_loss_curve") or self.val_curve

    def _progress(self, event: Event) -> None:
        self.state = text_of(event, "state") or self.state
        self._stage(event)
        self.step = int_of(event, "step") or 0
        self.steps = int_of(event, "steps") or self.steps
        self.rounds_completed = max(self.rounds_completed or 0, int_of(event, "rounds") or 0)
        self.bytes_sent = int_of(event, "bytes_sent") or self.bytes_sent
        self.bytes_received = int_of(event, "bytes_received") or self.bytes_received
        for key in ("loss", "gradient_norm", "steps_per_s", "samples_per_s", "tokens_per_s"):
            setattr(self, key, events.float_of(event, key))
        self.started = self.started or self.state == "training"
        _extend(self.curve, self.step, self.loss)

    @property
    def verdicts(self) -> list[dict[str, object]]:
        """The faults that this worker has located, those that are gone among them (`until`)."""
        told = (self.result or {}).get("verdicts")
        known = told if isinstance(told, list) else self.located.values()
        return [dict(each) for each in known if isinstance(each, Mapping)]

    def _finish(self, event: Event) -> None:
        self.result = dict(event)
        self._stage(event)
        self.warn(events.names_of(event, "warnings"))
        reason = text_of(event, "reason") or "ended"
        stopped = reason.startswith("SIG")  # a worker names the signal that stopped it
        self.state = {"finished": "done"}.get(reason, "interrupted" if stopped else reason)
        for name in ("step", *COUNTS):
            if (value := int_of(event, name)) is not None:
                setattr(self, name, value)

    def _stage(self, event: Event) -> None:
        stage = int_of(event, "stage")
        self.stage = stage if stage is not None and stage >= 0 else self.stage


def _extend(curve: Curve, step: int | None, loss: float | None) -> None:
    """Adds a point that is later than the last; thins the curve out where it grows long."""
    if step is not None and loss is not None and step > (curve[-1][0] if curve else -1):
        curve.append((step, loss))
        if len(curve) > _MAX_CURVE_POINTS:
            del curve[1::2]


def _is_later(last: dict[int, int], event: Event) -> bool:
    """Tells whether this is a later round of its fragment than the last counted; then counts it."""
    fragment, round_ = int_of(event, "fragment") or 0, int_of(event, "round") or 0
    if round_ <= last.get(fragment, -1) or (fragment not in last and len(last) >= _MAX_FRAGMENTS):
        return False
    last[fragment] = round_
    return True
