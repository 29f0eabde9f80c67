"""Copies of checkpoints elsewhere, which a worker goes on from that comes back on an empty disk.

    COPY_TO/writer                           which process copies there
            step-00000300/tensors.safetensors
                          manifest.json      written last: without it there is no checkpoint

fsspec carries them, so COPY_TO is a folder, or a URL such as `s3://bucket/run/w1`.
"""

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec

from murmuration.worker.config import CheckpointConfig
from murmuration.worker.errors import CheckpointError, ConfigError
from murmuration.worker.training import checkpoint

_WRITER = "writer"


class NotCopied(Exception):
    """A copy could not be made; says why in one line."""


class RemoteCopies:
    """Where this process copies checkpoints to. any thread, one at a time.

    Args:
        url: of one worker alone, as `checkpoint.copy_to` names it.
        keep: how many stay.

    Attributes:
        fetched: where one was brought to from there; None: none was.

    Raises:
        ConfigError: nothing here can write to such a URL.
    """

    fetched: Path | None = None

    def __init__(self, url: str, keep: int) -> None:
        self._said = f"checkpoint.copy_to = {url!r}"
        self._keep, self._own = keep, uuid.uuid4().hex.encode()
        try:
            self._files, root = fsspec.url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError, OSError) as error:
            raise ConfigError(f"{self._said}: {_line(error)}; or name another place") from error
        self._root = root.rstrip("/")

    @classmethod
    def begun(cls, config: CheckpointConfig, folder: Path, *, fresh: bool) -> "RemoteCopies | None":
        """None where nothing is to be copied. Into a folder without checkpoints comes the newest
        copy that is whole.

        Raises:
            ConfigError: as for the class.
            CheckpointError: copies of before stand where a fresh run would put its own, or nothing
                can be read or written there.
        """
        if not config.copy_to:
            return None
        copies = cls(config.copy_to, config.keep)
        try:
            with _told():
                copies._begin(folder, fresh)
        except NotCopied as error:
            raise CheckpointError(
                f"{copies._said}: {error}; make it one that this machine reaches and may write to"
            ) from error
        return copies

    def _begin(self, folder: Path, fresh: bool) -> None:
        steps = self._steps()
        if steps and fresh:
            raise CheckpointError(
                f"{self._said} holds {steps[0]} of an earlier run; name another place, or leave "
                "out --fresh"
            )
        if steps and not checkpoint.any_in(folder):
            self.fetched = self._fetch_one(folder, steps)
        self._files.makedirs(self._root, exist_ok=True)
        self._files.pipe_file(f"{self._root}/{_WRITER}", self._own)

    def put(self, path: Path) -> None:
        """Copies a checkpoint. Raises NotCopied."""
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
        """Names of copies, the newest first."""
        if not self._files.exists(self._root):
            return []
        names = (found.rsplit("/", 1)[-1] for found in self._files.ls(self._root, detail=False))
        return checkpoint.newest_first(names)

    def _fetch_one(self, folder: Path, steps: list[str]) -> Path:
        """The first of them that is whole. Raises CheckpointError."""
        for step in steps:
            arriving = folder / f".partial-{step}"
            shutil.rmtree(arriving, ignore_errors=True)
            folder.mkdir(parents=True, exist_ok=True)
            self._files.get(f"{self._root}/{step}/", f"{arriving}/", recursive=True)
            try:
                checkpoint.load_one(arriving)
            except checkpoint.CheckpointDamaged:
                shutil.rmtree(arriving)
                continue
            return arriving.rename(folder / step)
        raise CheckpointError(f"{self._said} holds no checkpoint that is whole; name another place")


@contextmanager
def _told() -> Iterator[None]:
    """Raises NotCopied for whatever the library of such URLs raises."""
    try:
        yield
    except (NotCopied, CheckpointError):
        raise
    except Exception as error:  # each library has errors of its own
        raise NotCopied(_line(error)) from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
