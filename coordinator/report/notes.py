"""Which events deserve a line of their own, and in which words."""

from collections.abc import Callable, Mapping

from coordinator.rendezvous.records import (
    Event,
    exit_words,
    float_of,
    int_of,
    names_of,
    printable,
    text_of,
)

_MAX_SEEN = 10_000
_WORSE = ("alive", "suspect", "dead")


class Notes:
    """Turns events into lines for people. What several workers report alike is said once."""

    def __init__(self) -> None:
        self._starts: set[tuple[str, ...]] = set()
        self._health: dict[str, int] = {}
        self._refusals: set[tuple[str | None, str | None, int | None]] = set()
        self._warned: dict[str, set[str]] = {}  # by text, who has said so since it was last a line
        self._writers: dict[str, Callable[[Event], str | None]] = {
            "started": self._started,
            "round_failed": _round_failed,
            "adopted": _adopted,
            "refused": self._refused,
            "warning": self._warning,
            "moves": lambda event: (
                f"moves from stage {_stage(event, 'stage')} to {_stage(event, 'to')}"
            ),
            "rebuilt": _rebuilt,
            "member": self._member,
            "result": _result,
            "exit": _exit,
        }

    def line(self, event: Event) -> str | None:
        """The line for this event, or None where it is ordinary."""
        kind, peer = text_of(event, "event"), text_of(event, "peer") or "?"
        writer = self._writers.get(kind or "")
        words = writer(event) if writer else None
        return " ".join(f"{peer} {words}".split()) if words else None

    def _started(self, event: Event) -> str | None:
        group, step = names_of(event, "group"), int_of(event, "step") or 0
        start = (*group, str(step))
        if start in self._starts or len(self._starts) >= _MAX_SEEN:
            return None
        self._starts.add(start)
        return f"starts training at step {step} with {', '.join(group) or 'nobody'}"

    def _warning(self, event: Event) -> str | None:
        """A line, unless it is of a stage and another worker has said it; again where one repeats
        itself."""
        text, peer = text_of(event, "text") or "?", text_of(event, "peer") or "?"
        if int_of(event, "stage") is not None:
            said = self._warned.setdefault(text, set()) if len(self._warned) < _MAX_SEEN else set()
            if said and peer not in said:
                said.add(peer)
                return None
            said.clear()
            said.add(peer)
        return f"warning: {text}"

    def _refused(self, event: Event) -> str | None:
        """Once for each peer, sender and round: a link that breaks often loses many shards."""
        refusal = text_of(event, "peer"), text_of(event, "sender"), int_of(event, "round")
        if refusal in self._refusals or len(self._refusals) >= _MAX_SEEN:
            return None
        self._refusals.add(refusal)
        words = "asks for it again" if event.get("again") is True else "refused"
        return f"{words}: {text_of(event, 'reason') or '?'}"

    def _member(self, event: Event) -> str | None:
        """Doubts, deaths and returns; that a peer joins or leaves in good order is ordinary."""
        changed = text_of(event, "peer_changed") or "?"
        health = (text_of(event, "health") or "").lower()
        told = self._health.get(changed, 0)
        rank = _WORSE.index(health) if health in _WORSE else 0
        if rank == told or 0 < rank < told or len(self._health) >= _MAX_SEEN:
            return None  # known, or a slower witness of what was already said
        self._health[changed] = rank
        return f"sees {changed} {'alive again' if rank == 0 else health}"


def _round_failed(event: Event) -> str:
    missing = names_of(event, "waiting_for")
    tail = f"; it waited for {', '.join(missing)}" if missing else ""
    return (
        f"gave up round {int_of(event, 'round')} of fragment {int_of(event, 'fragment')}: "
        f"{text_of(event, 'reason') or 'no reason given'}{tail}"
    )


def _adopted(event: Event) -> str:
    reason = text_of(event, "reason")
    return (
        f"took over the state of {text_of(event, 'donor') or '?'} at step {int_of(event, 'step')}"
        f"{f': {reason}' if reason else ''}"
    )


def _rebuilt(event: Event) -> str:
    told = event.get("from")
    weights = {str(n): told[n] for n in told} if isinstance(told, Mapping) else {}
    parts = [
        f"{100 * weight:.0f} % of stage {printable(stage)}"
        for stage in weights
        if (weight := float_of(weights, stage)) is not None
    ]
    return f"has made stage {_stage(event, 'stage')} anew, from {' and '.join(parts) or 'nothing'}"


def _stage(event: Event, key: str) -> str:
    stage = int_of(event, key)
    return "?" if stage is None else str(stage)


def _result(event: Event) -> str:
    loss, step = float_of(event, "val_loss"), int_of(event, "step")
    words = "finished" if text_of(event, "reason") == "finished" else "ended"
    return f"{words} at step {step}" + (f", validation loss {loss:.3f}" if loss else "")


def _exit(event: Event) -> str | None:
    code = int_of(event, "exit_code")
    if code is None or exit_words(code) in ("done", "interrupted"):
        return None
    reason = text_of(event, "text")
    return f"has ended: {exit_words(code)}" + (f": {reason}" if reason else "")
