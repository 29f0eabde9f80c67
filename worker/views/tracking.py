"""Figures of a run for trackers of experiments: TensorBoard, Weights & Biases, trackio.

All are told the same, on a thread of their own: one that is slow loses figures.
"""

import importlib
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from murmuration.protos.events import float_of, int_of
from murmuration.worker.errors import ConfigError

_MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "trackio": "trackio"}
TRACKERS = tuple(_MODULES)
_MOST_WAITING = 1024
_END_S = 10.0
_OF_PROGRESS = {
    "loss": "train/loss",
    "learning_rate": "train/learning_rate",
    "gradient_norm": "train/gradient_norm",
    "tokens": "train/tokens",
    "steps_per_s": "speed/steps_per_s",
    "samples_per_s": "speed/samples_per_s",
    "tokens_per_s": "speed/tokens_per_s",
    "mfu": "speed/mfu",
    "device_memory_bytes": "device/memory_bytes",
    "rounds": "rounds/completed",
    "bytes_sent": "traffic/bytes_sent",
    "bytes_received": "traffic/bytes_received",
}
_OF_ROUND = {"exchange_s": "rounds/exchange_s", "stall_s": "rounds/stall_s"}

Event = dict[str, object]


class _Tracker(NamedTuple):
    kind: str
    log: Callable[[dict[str, float], int], object]  # figures, step
    close: Callable[[], object]


def _begun(name: str, module: Any, out: Path, peer: str) -> _Tracker:
    """Weights & Biases and trackio have the same functions, but only the first takes a folder."""
    if name == "tensorboard":
        writer = module.SummaryWriter(str(out / "tensorboard" / peer))

        def log(figures: dict[str, float], step: int) -> None:
            for key, value in figures.items():
                writer.add_scalar(key, value, step)

        return _Tracker("TensorBoard", log, writer.close)
    where = {"dir": str(out)} if name == "wandb" else {}
    module.init(project="murmuration", name=peer, **where)
    return _Tracker(
        "TrackedRun", lambda figures, step: module.log(figures, step=step), module.finish
    )


class Trackers:
    """Passes a worker's events on, and tells trackers of them. any thread. Args: out, peer: the
    worker's folder and name. Raises ConfigError: a library is missing, or cannot begin."""

    def __init__(
        self, names: Sequence[str], out: Path, peer: str, announce: Callable[[Event], None]
    ) -> None:
        modules = {}
        for name in names:  # all, before any writes a file
            try:
                modules[name] = importlib.import_module(_MODULES[name])
            except ImportError as error:
                raise ConfigError(
                    f"--track {name}: it is not installed: pip install 'murmuration[{name}]'"
                ) from error
        self._trackers: list[_Tracker] = []
        for name, module in modules.items():
            try:
                self._trackers.append(_begun(name, module, out, peer))
            except Exception as error:  # of a library
                raise ConfigError(f"--track {name}: it cannot begin: {error}") from error
        self._announce, self._step = announce, 0
        self._waiting = queue.Queue[tuple[dict[str, float], int] | None](_MOST_WAITING)
        self._thread = threading.Thread(target=self._tell, name="murmur-track", daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        self._announce(event)
        step = int_of(event, "step")
        self._step = self._step if step is None else step
        if (figures := figures_of(event)) and not self._waiting.full():
            self._waiting.put_nowait((figures, self._step))

    def close(self) -> None:
        with suppress(queue.Full):  # a tracker hangs
            self._waiting.put(None, timeout=_END_S)
        self._thread.join(_END_S)

    def _tell(self) -> None:
        failed: set[int] = set()
        while (told := self._waiting.get()) is not None:
            for number, tracker in enumerate(self._trackers):
                try:
                    if number not in failed:
                        tracker.log(*told)
                except Exception as error:  # of a library: training goes on without it
                    failed.add(number)
                    text = f"{tracker.kind} takes no more figures: {error}"
                    text += "; training goes on without"
                    self._announce({"event": "warning", "text": text})
        for tracker in self._trackers:
            tracker.close()


def figures_of(event: Mapping[str, object]) -> dict[str, float]:
    match event.get("event"):
        case "progress" if event.get("state") == "training":
            return _named(event, _OF_PROGRESS)
        case "round":
            return _named(event, _OF_ROUND)
        case "validation" | "result":
            metrics = event.get("val_metrics")
            own = metrics if isinstance(metrics, Mapping) else {}
            names = {str(key): f"validation/{key}" for key in own}
            return _named(event, {"val_loss": "validation/loss"}) | _named(own, names)
    return {}


def _named(event: Mapping[str, object], names: Mapping[str, str]) -> dict[str, float]:
    found = {name: float_of(event, key) for key, name in names.items()}
    return {name: value for name, value in found.items() if value is not None}
