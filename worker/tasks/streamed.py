"""Windows of tokens of a data set that is read as it comes, by the library `datasets`.

    documents ──► in the stream's own order ──► tokens, one document after another ──► windows

It may be larger than the disk. Which documents are held out follows from what they say, so every
machine holds out the same ones.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from murmuration.worker.errors import TaskError, TextError
from murmuration.worker.tasks.task import Cursor
from murmuration.worker.tasks.text import HELD_OUT_SHARE

Tokens = npt.NDArray[np.int64]

_SHUFFLED = 1000  # documents that are held to draw the next one from


class Streamed:
    """The windows of one data set.

    Args:
        source: arguments of `datasets.load_dataset`, such as `path`, `data_files`, `name`, `split`.
        column: the documents' text.
        tokenized: the tokens of a text, 1-D.
        end: the token after a document; None for none.

    Raises:
        TaskError: `datasets` is missing, or refuses the source; or there is no such column.
    """

    def __init__(
        self,
        source: Mapping[str, Any],
        column: str,
        tokenized: Callable[[bytes], Tokens],
        end: int | None,
    ) -> None:
        try:
            datasets: Any = importlib.import_module("datasets")
        except ModuleNotFoundError as error:
            raise TaskError(
                f"dataset: needs {error.name}: pip install 'murmuration[datasets]'"
            ) from error
        self._source, self._column, self._end = dict(source), column, end
        self._tokenized = tokenized
        with self._as_task_error():
            self._data = datasets.load_dataset(**{"split": "train", **source, "streaming": True})
            found = list(next(iter(self._data), {}))
        if column not in found:
            raise TaskError(
                f"dataset {self._source}: no column {column!r} in its documents: set task.column "
                f"to one of {', '.join(found) or 'none: it is empty'}"
            )

    def windows(self, split: str, cursor: Cursor, size: int) -> Iterator[Tokens]:
        """Return windows without end, each (size,), with the last token of one as the next's first.

        A stream begins with the window at `cursor.position`: those before it are read and left
        out. The order of documents depends on seed and stream, and for validation on nothing.

        Raises:
            TaskError: the data set cannot be read any more.
            TextError: all its documents of this split together are shorter than a window.
        """
        return itertools.islice(self._all_windows(split, cursor, size), cursor.position, None)

    def _all_windows(self, split: str, cursor: Cursor, size: int) -> Iterator[Tokens]:
        data = self._data
        if split == "train":
            name = f"{cursor.seed}/{cursor.stream}".encode()
            seed = int.from_bytes(hashlib.blake2b(name, digest_size=4).digest(), "big")
            data = data.shuffle(seed=seed, buffer_size=_SHUFFLED)
        rest, epoch, found = np.empty(0, np.int64), 0, True
        while found:
            found = False
            data.set_epoch(epoch)
            for text in self._documents(data, split):
                ends = [] if self._end is None else [self._end]
                rest = np.concatenate([rest, self._tokenized(text), np.array(ends, np.int64)])
                while rest.size >= size:
                    found = True
                    yield rest[:size]
                    rest = rest[size - 1 :]
            epoch += 1
        raise TextError(
            f"dataset {self._source}: too short: one sample takes {size:,} tokens of {split}, and "
            "all documents together have fewer: give more text or a smaller context"
        )

    def _documents(self, data: Any, split: str) -> Iterator[bytes]:
        with self._as_task_error():
            for each in data:
                text = str(each[self._column]).encode()
                digest = hashlib.blake2b(text, digest_size=8).digest()
                held_out = int.from_bytes(digest, "big") < HELD_OUT_SHARE * 2**64
                if held_out == (split == "validation"):
                    yield text

    @contextmanager
    def _as_task_error(self) -> Iterator[None]:
        """Whatever the library and those below it raise is one line."""
        try:
            yield
        except Exception as error:
            line = " ".join(str(error).split())[:300]
            raise TaskError(f"dataset {self._source}: {type(error).__name__}: {line}") from error
