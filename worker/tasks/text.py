"""Text to learn from, as bytes, with a part held out that is never trained on.

Text comes from a file, a folder, a glob, or ("stdlib") the sources of the Python standard
library, which every machine that runs us has. The split into training and held-out text depends
on the files' relative names alone, so machines that keep the same text in different places, or
run different Python versions, hold out the same files.

A data set that is read as it comes, by the library `datasets`, may be larger than the disk:

    documents ──► in the stream's own order ──► tokens, one document after another ──► windows

Which documents are held out follows from what they say, so every machine holds out the same ones.
"""

from __future__ import annotations

import glob as globbing
import hashlib
import importlib
import itertools
import os
import sysconfig
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from murmuration.protos.figures import count, shown
from murmuration.worker.errors import TaskError, TextError
from murmuration.worker.tasks.task import Batch, Cursor, one_line

STDLIB = "stdlib"
HELD_OUT_SHARE = 0.1

# Not the library's prose: its tests, tables that a program wrote, and copies of other software.
_STDLIB_SKIPPED_FOLDERS = frozenset(
    {
        *("site-packages", "dist-packages", "ensurepip"),
        *("test", "tests", "idle_test", "turtledemo", "__phello__"),
        *("idlelib", "lib2to3", "distutils", "encodings", "pydoc_data"),
    }
)
_STDLIB_SKIPPED_PREFIXES = ("_sysconfigdata", "_pydecimal")
_BINARY_PROBE_BYTES = 8192
_BOM = b"\xef\xbb\xbf"  # of UTF-8
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")  # those of UTF-32 begin likewise, or with zeros
_EMPTY, _UTF16, _NOWHERE = "without a byte", "in UTF-16", "by links that lead nowhere"
_BINARY = "with zero bytes, binary or in UTF-16"
_CONVERT = "make it UTF-8, as with `iconv -f UTF-16 -t UTF-8`"
_NAMED = 3  # files that a line names
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio: splitmix64's increment
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SHUFFLED = 1000  # documents of a data set that are held to draw the next one from

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """Text in two parts that share no byte: uint8, 1-D; may be a read-only map of a file."""

    train: Bytes
    validation: Bytes
    warnings: tuple[str, ...] = ()  # what of the text is left out or may be none, a line each


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """The windows of a text that follow one another: inputs and targets, int64, each (size,).

    Targets are one token further on, so that each token but the first is a target once. Args:
    tokens: 1-D, integers, more than `size`; what is left at the end is left out."""

    def __init__(self, tokens: npt.NDArray[np.integer[Any]], size: int) -> None:
        self._tokens, self._size = tokens, size

    def __len__(self) -> int:
        return (self._tokens.size - 1) // self._size

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        first = place * self._size
        window = torch.from_numpy(self._tokens[first : first + self._size + 1].astype(np.int64))
        return window[:-1], window[1:]


def drawn_windows(
    tokens: npt.NDArray[np.integer[Any]], cursor: Cursor, samples: int, size: int
) -> Iterator[Batch]:
    """Yield batches without end: inputs and targets are int64, (samples, size), with the targets
    one token further on. Where a window begins follows from the cursor alone. Args: tokens: 1-D;
    samples: of a batch; size: tokens of an input."""
    offsets = np.arange(size + 1)
    while True:
        starts = window_starts(cursor, samples, tokens.size - size)
        cursor = cursor.advance(samples)
        yield batch_of(torch.from_numpy(tokens[starts[:, None] + offsets].astype(np.int64)), cursor)


def window_starts(cursor: Cursor, samples: int, places: int) -> npt.NDArray[np.int64]:
    """Return where the next samples begin: int64, (samples,), each in [0, places).

    Counter-based: number `position` is splitmix64 at that counter, keyed by a hash of the seed and
    the stream, so any of them is found without those before it."""
    name = f"{cursor.seed}/{cursor.stream}".encode()
    key = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")
    counter = np.arange(samples, dtype=np.uint64) + np.uint64(cursor.position)
    state = np.uint64(key) + (counter + np.uint64(1)) * _GOLDEN  # wraps at 2**64, as it should
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    state ^= state >> np.uint64(31)
    return (state % np.uint64(places)).astype(np.int64)


def batch_of(windows: Tensor, cursor: Cursor) -> Batch:
    return Batch(windows[:, :-1].contiguous(), windows[:, 1:].contiguous(), cursor)


def load_text(source: str, *, min_bytes: int = 1) -> Corpus:
    """Load text and set a part of it aside: the last tenth of a single file; of several, about a
    tenth of the files, chosen by a hash of their names relative to the folder (or to the part of a
    glob before its first wildcard).

    A file with the same contents as an earlier one counts once. Hidden files and links to folders
    are passed over. So are empty files, those in UTF-16 and binary ones, which hold a zero byte
    near their start, and links that lead nowhere: `warnings` names them. Args: source: a file, a
    folder, a glob, or "stdlib"; min_bytes: what each part must at least hold. Raises TextError:
    nothing is there, it cannot be read, it is in UTF-16, or a part is too short."""
    if not isinstance(source, str):
        raise TextError(f"text must be a path or {STDLIB!r}, got {source!r}")
    path = Path(source).expanduser()
    if source != STDLIB and path.is_file():
        corpus = _load_file(source, path)
    else:
        root, names = _list_files(source, path)
        corpus = _load_files(source, root, names)
    for part, size in (("train on", corpus.train.size), ("hold out", corpus.validation.size)):
        if size < min_bytes:
            why = f"too short: {size:,} bytes to {part}, but one sample takes {min_bytes:,}"
            raise _refused(source, f"{why}: give more text or a smaller context")
    return corpus


def _refused(source: str, why: str) -> TextError:
    return TextError(f"text {source!r}: {why}")


def _load_file(source: str, path: Path) -> Corpus:
    text: Bytes = np.empty(0, dtype=np.uint8)
    try:
        if path.stat().st_size:
            text = np.memmap(path, dtype=np.uint8, mode="r")
    except OSError as error:
        raise _unreadable(source, path, error) from error
    kind = _unfit(text[:_BINARY_PROBE_BYTES].tobytes())
    if kind == _UTF16:
        raise _refused(source, f"the file is in UTF-16: {_CONVERT}")
    found = (f"text {source!r} holds zero bytes, as binary files do",) if kind == _BINARY else ()
    text = text[len(_BOM) :] if text[: len(_BOM)].tobytes() == _BOM else text
    cut = text.size - int(text.size * HELD_OUT_SHARE)
    return Corpus(text[:cut], text[cut:], found)


def _list_files(source: str, path: Path) -> tuple[Path, list[str]]:
    """Return the folder that names are relative to, and the sorted names ('/' between parts)."""
    if source == STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        names = [
            name
            for name in _walk(root, skipped=_STDLIB_SKIPPED_FOLDERS)
            if name.endswith(".py")
            and not name.rpartition("/")[2].startswith(_STDLIB_SKIPPED_PREFIXES)
        ]
        missing = f"this Python keeps no sources in {root}: name a file or folder"
    elif path.is_dir():
        root, names = path, list(_walk(path))
        missing = "the folder holds no file: put text files into it"
    elif globbing.has_magic(source):
        fixed = itertools.takewhile(lambda part: not globbing.has_magic(part), path.parts[:-1])
        root, matches = Path(*fixed), globbing.iglob(str(path), recursive=True)
        names = [Path(each).relative_to(root).as_posix() for each in matches if _is_listed(each)]
        missing = ""
    elif path.is_symlink():
        to = os.readlink(path)
        why = f"the link leads to {to}, and from there nowhere: mend it, or name the file itself"
        raise _refused(source, why)
    else:
        why = f"no such file or folder (looked at {path.absolute()}): name one that exists"
        raise _refused(source, f"{why}, or {STDLIB!r} for Python's own sources")
    if not names:
        unmatched = "no file matches: check the pattern (it is read relative to"
        raise _refused(source, missing or f"{unmatched} {Path.cwd()})")
    return root, sorted(names)


def _walk(root: Path, skipped: frozenset[str] = frozenset()) -> Iterator[str]:
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [
            name
            for name in subfolders
            if not name.startswith((".", "config-")) and name not in skipped | {"__pycache__"}
        ]
        for name in files:
            path = os.path.join(folder, name)
            if not name.startswith(".") and _is_listed(path):
                yield Path(path).relative_to(root).as_posix()


def _leads_nowhere(path: str) -> bool:
    return os.path.islink(path) and not os.path.exists(path)


def _is_listed(path: str) -> bool:
    """Not a pipe or a device, which would block or never end."""
    return os.path.isfile(path) or _leads_nowhere(path)


def _load_files(source: str, root: Path, names: Sequence[str]) -> Corpus:
    texts: dict[str, bytes] = {}
    seen: set[bytes] = set()
    left_out: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        path = root / name
        if _leads_nowhere(str(path)):
            left_out[_NOWHERE].append(name)
            continue
        try:
            text = path.read_bytes().removeprefix(_BOM)
        except OSError as error:
            raise _unreadable(source, path, error) from error
        if (kind := _unfit(text)) is not None:
            left_out[kind].append(name)
            continue
        digest = hashlib.blake2b(text, digest_size=16).digest()
        if digest not in seen:
            seen.add(digest)
            texts[name] = text
    told = "; ".join(_told(kind, names) for kind, names in left_out.items())
    if not texts:
        do = "put text into it" if left_out.keys() <= {_EMPTY, _NOWHERE} else _CONVERT
        raise _refused(source, f"no file holds text: {told}: {do}")
    held_out = _held_out(texts)
    train = b"".join(text for name, text in texts.items() if name not in held_out)
    validation = b"".join(text for name, text in texts.items() if name in held_out)
    if not held_out:  # one file at most: cut it, as if it had been named itself
        cut = len(train) - int(len(train) * HELD_OUT_SHARE)
        train, validation = train[:cut], train[cut:]
    return Corpus(
        train=np.frombuffer(train, dtype=np.uint8),
        validation=np.frombuffer(validation, dtype=np.uint8),
        # The library's empty modules are as they should be.
        warnings=(f"text {source!r}: left out: {told}",) if told and source != STDLIB else (),
    )


def _unfit(text: bytes) -> str | None:
    """Why a file, or its beginning, holds no text; None where it does."""
    if not text:
        return _EMPTY
    if text.startswith(_UTF16_MARKS):
        return _UTF16
    return _BINARY if b"\0" in text[:_BINARY_PROBE_BYTES] else None


def _told(kind: str, names: Sequence[str]) -> str:
    """`3 files in UTF-16 (a.txt, b.txt, ...)`."""
    first = ", ".join(shown(name) for name in names[:_NAMED])
    more = ", ..." if len(names) > _NAMED else ""
    return f"{count(len(names), 'file')} {kind} ({first}{more})"


def _held_out(names: Iterable[str]) -> set[str]:
    """Return about a tenth of the names, at least one and never all; none of fewer than two."""

    def rank(name: str) -> float:
        digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
        return int.from_bytes(digest, "big") / 2**64

    ranked = sorted((rank(name), name) for name in names)
    few = {name for place, name in ranked if place < HELD_OUT_SHARE}
    chosen = few or {name for _, name in ranked[:1]}
    return chosen - {ranked[-1][1]} if len(chosen) == len(ranked) else chosen


def _unreadable(source: str, path: Path, error: OSError) -> TextError:
    why = f"cannot read {path}: {error.strerror or error}"
    return _refused(source, f"{why}: make it readable or leave it out")


def check_sizes(**sizes: object) -> None:
    """Raises TaskError: one of these is no integer of at least 1."""
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise TaskError(f"{name} must be an integer of at least 1, got {size!r}")


def next_token(logits_V: Tensor, temperature: float, generator: Any = None) -> Tensor:  # noqa: N803
    """Draw a token, as a tensor of one; temperature 0 takes the likeliest."""
    if temperature > 0:
        return torch.multinomial((logits_V / temperature).softmax(0), 1, generator=generator)
    return logits_V.argmax(keepdim=True)


def library(name: str, wanted_by: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        why = f"{wanted_by} needs {error.name}: pip install 'murmuration[{extra}]'"
        raise TaskError(why) from error


Tokens = npt.NDArray[np.int64]


class Streamed:
    """The windows of one data set. Raises TaskError: `datasets` is missing, or refuses the source;
    or there is no such column. Args: source: arguments of `datasets.load_dataset`, such as `path`,
    `data_files`, `name`, `split`; column: the documents' text; tokenized: the tokens of a text,
    1-D; end: the token after a document; None for none."""

    def __init__(
        self,
        source: Mapping[str, Any],
        column: str,
        tokenized: Callable[[bytes], Tokens],
        end: int | None,
    ) -> None:
        datasets = library("datasets", "dataset:", "datasets")
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

        A stream begins with the window at `cursor.position`: those before it are read and left out.
        The order of documents depends on seed and stream, and for validation on nothing. Raises
        TaskError: the data set cannot be read any more; TextError: all its documents of this split
        together are shorter than a window."""
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
            for value in (v for each in data if (v := each[self._column]) is not None):
                text = str(value).encode()
                digest = hashlib.blake2b(text, digest_size=8).digest()
                held_out = int.from_bytes(digest, "big") < HELD_OUT_SHARE * 2**64
                if held_out == (split == "validation"):
                    yield text

    @contextmanager
    def _as_task_error(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            said = f"{type(error).__name__}: {one_line(error)[:300]}"
            raise TaskError(f"dataset {self._source}: {said}") from error
