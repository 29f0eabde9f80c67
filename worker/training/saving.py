"""Checkpoints beside training: written by a thread of their own, one at a time, and no more often
than the training can bear. And copies of them elsewhere, which a worker goes on from that comes
back on an empty disk.

    COPY_TO/writer                           which process copies there
            step-00000300/tensors.safetensors
                          manifest.json      written last: without it there is no checkpoint

fsspec carries them, so COPY_TO is a folder, or a URL such as `s3://bucket/run/w1`.
"""

import math
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
from torch import Tensor

from murmuration.protos.events import Log, new_event
from murmuration.protos.figures import duration
from murmuration.worker.config import CheckpointConfig
from murmuration.worker.errors import CheckpointError, ConfigError
from murmuration.worker.tasks.task import one_line
from murmuration.worker.training import checkpoint

_WRITER = "writer"


class NotCopied(Exception):
    """A copy could not be made; says why in one line."""


class RemoteCopies:
    """The place to which this process copies checkpoints. any thread, one at a time. Args: url: of
    one worker alone, as `checkpoint.copy_to` names it; keep: how many stay. Attributes: to_tell:
    what was brought here from there, and what is damaged, a line each. Raises ConfigError: nothing
    here can write to such a URL."""

    def __init__(self, url: str, keep: int) -> None:
        self._said = f"checkpoint.copy_to = {url!r}"
        self._keep, self._own, self.to_tell = keep, uuid.uuid4().hex.encode(), list[str]()
        try:
            self._files, root = fsspec.url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError, OSError) as error:
            raise ConfigError(f"{self._said}: {one_line(error)}; or name another place") from error
        self._root = root.rstrip("/")

    @classmethod
    def begun(cls, config: CheckpointConfig, folder: Path, *, fresh: bool) -> "RemoteCopies | None":
        """Gives None where nothing is to be copied. Into a folder without checkpoints comes the
        newest copy that is whole. Raises ConfigError: as for the class; CheckpointError: copies of
        before stand where a fresh run would put its own, or nothing can be read or written there.
        """
        if not config.copy_to:
            return None
        copies = cls(config.copy_to, config.keep)
        files, said = copies._files, copies._said
        try:
            with _told():
                if (steps := copies._steps()) and fresh:
                    raise CheckpointError(
                        f"{said} holds {steps[0]} of an earlier run; name another place, or leave "
                        "out --fresh"
                    )
                if steps and not checkpoint.any_in(folder):
                    copies._fetch_one(folder, steps)
                files.makedirs(copies._root, exist_ok=True)
                files.pipe_file(f"{copies._root}/{_WRITER}", copies._own)
        except NotCopied as error:
            raise CheckpointError(
                f"{said}: {error}; make it one that this machine reaches and may write to"
            ) from error
        return copies

    def put(self, path: Path) -> None:
        there = f"{self._root}/{path.name}"
        with _told():
            if self._files.cat_file(f"{self._root}/{_WRITER}") != self._own:
                raise NotCopied("another worker copies there now; each needs a place of its own")
            self._files.makedirs(there, exist_ok=True)
            for file in sorted(path.iterdir(), key=lambda file: file.name == checkpoint.MANIFEST):
                self._files.put_file(str(file), f"{there}/{file.name}")
            for old in self._steps()[self._keep :]:
                self._files.rm(f"{self._root}/{old}", recursive=True)

    def _steps(self) -> list[str]:
        if not self._files.exists(self._root):
            return []
        names = (found.rsplit("/", 1)[-1] for found in self._files.ls(self._root, detail=False))
        return checkpoint.newest_first(names)

    def _fetch_one(self, folder: Path, steps: list[str]) -> None:
        for step in steps:
            arriving = folder / f".partial-{step}"
            shutil.rmtree(arriving, ignore_errors=True)
            folder.mkdir(parents=True, exist_ok=True)
            self._files.get(f"{self._root}/{step}/", f"{arriving}/", recursive=True)
            try:
                checkpoint.load_one(arriving)
            except checkpoint.CheckpointDamaged as error:
                shutil.rmtree(arriving)
                back = "" if step == steps[-1] else "; going back to the one before"
                self.to_tell += [f"{self._said}: {step}: {error}{back}"]
            else:
                self.to_tell += [f"{arriving.rename(folder / step)} was fetched: {self._said}"]
                return
        raise CheckpointError(f"{self._said} holds no checkpoint that is whole; name another place")


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except (NotCopied, CheckpointError):
        raise
    except Exception as error:  # each library has errors of its own
        raise NotCopied(one_line(error)) from error


Snapshot = tuple[Mapping[str, Tensor], Mapping[str, Any]]  # tensors, plain values

SHARE = 0.03  # of the time, that checkpoints may cost the training
_USUAL_BYTES_PER_S = 1e9  # of the first, before one was measured
_WORTH_TELLING_S, _MUCH = 5.0, 3.0  # an interval, and times what was asked for


class Saver:
    """Begins checkpoints when they are due. train thread only.

    A checkpoint costs the training the time to copy what is saved, during which it stands still,
    and the processor's time to write it, which it lacks. Args: folder, config: where checkpoints
    go, how often, how many stay; expected_bytes: of a checkpoint, about; log: takes events; saved:
    is told of each how long it took to write, on the saving thread; copies: where some of them go
    too, on a thread of their own; None: nowhere."""

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig,
        expected_bytes: int,
        log: Log,
        saved: Callable[[float], None],
        copies: RemoteCopies | None = None,
    ) -> None:
        self._copies, self._copied_at = copies, -math.inf
        self._copied: Path | None = None
        self._read: Path | None = None  # by the copying thread
        self._copier = ThreadPoolExecutor(1, "murmur-copy")
        self._copying: Future[None] | None = None
        self._folder, self._config, self._log, self._saved = folder, config, log, saved
        self._cost_s, self._began_s = expected_bytes / _USUAL_BYTES_PER_S, time.monotonic()
        self._thread = ThreadPoolExecutor(1, "murmur-save")
        self._saving: Future[None] | None = None
        self._is_told = False
        self.path: Path | None = None  # of the last one
        self.failed = False  # what was to be saved last is not

    @property
    def interval_s(self) -> float:
        """Seconds from one to the next: as the user wants it, or more where one costs too much."""
        return max(self._config.every_s, self._cost_s / SHARE)

    def save_if_due(self, step: int, snapshot: Callable[[], Snapshot]) -> None:
        """Begins one if it is time, and none is on its way."""
        busy = self._saving is not None and not self._saving.done()
        if not busy and time.monotonic() - self._began_s >= self.interval_s:
            self.begin(step, snapshot)

    def begin(self, step: int, snapshot: Callable[[], Snapshot]) -> Future[None]:
        """Begins one: it ends beside the training."""
        self._began_s = time.monotonic()
        try:
            tensors, values = snapshot()
        except (MemoryError, RuntimeError) as error:  # torch's, where there is no room for a copy
            self._saving = self._thread.submit(self._fail, step, error)
            return self._saving
        copied_s = time.monotonic() - self._began_s
        self._saving = self._thread.submit(self._save, step, tensors, values, copied_s)
        return self._saving

    def close(self) -> None:
        """Returns when what has begun has ended, and the last checkpoint is copied."""
        self._thread.shutdown()
        if self._copies is not None and self.path is not None:
            self._copier.submit(self._copy, self.path)
        self._copier.shutdown()

    def _save(
        self, step: int, tensors: Mapping[str, Tensor], values: Mapping[str, Any], copied_s: float
    ) -> None:
        began_s, busy_s = time.monotonic(), time.thread_time()
        try:
            self.path = checkpoint.save(self._folder, step, tensors, values)
        except Exception as error:  # of the disk, or of values that no file can hold
            self._fail(step, error)
        else:
            self.failed = False
            busy = self._copying is not None and not self._copying.done()
            due = time.monotonic() - self._copied_at >= self._config.copy_every_s
            if self._copies is not None and due and not busy:
                self._read, self._copied_at = self.path, time.monotonic()
                self._copying = self._copier.submit(self._copy, self.path)
            checkpoint.prune(self._folder, self._config.keep, self._read, self.path)
            took_s = time.monotonic() - began_s
            self._saved(took_s)
            where = {"path": str(self.path), "step": step}
            self._log(new_event("checkpoint", **where, seconds=round(took_s, 3)))
        self._cost_s = copied_s + time.thread_time() - busy_s
        interval_s, asked_s = self.interval_s, self._config.every_s
        if interval_s > max(_MUCH * asked_s, _WORTH_TELLING_S) and not self._is_told:
            self._is_told = True
            text = (
                f"a checkpoint costs {interval_s * SHARE:.2g} s of training: one is written every "
                f"{duration(interval_s)}, not every {asked_s:g} s as checkpoint.every_s says, so "
                f"that they take {100 * SHARE:.0f} % of the time"
            )
            self._log(new_event("warning", text=text))

    def _fail(self, step: int, error: Exception) -> None:
        """It is told once, and tried again each time."""
        if not self.failed:
            name, said = type(error).__name__, one_line(error)
            why = error if isinstance(error, OSError) else f"{name}: {said}"
            text = f"no checkpoint at step {step}: {why}; training goes on"
            self._log(new_event("warning", text=text))
        self.failed = True

    def _copy(self, path: Path) -> None:
        assert self._copies is not None
        if path == self._copied:
            return
        try:
            self._copies.put(path)
        except NotCopied as error:
            text = f"{path.name} is not copied to {self._config.copy_to}: {error}"
            self._log(new_event("warning", text=text))
        else:
            self._copied = path
