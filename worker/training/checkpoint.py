"""Checkpoints: written atomically, verified when read, the one before kept as a fallback.

A checkpoint is a folder `step-00000300` with `tensors.safetensors` and, written last,
`manifest.json` with the size and hash of the tensors. It becomes visible by one rename, so a kill
at any point leaves the newest or the one before. Nothing is ever unpickled.
"""

import hashlib
import hmac
import itertools
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from murmuration.protos.documents import canonical
from murmuration.protos.files import read_json, sync_folder, write_atomically
from murmuration.worker import config as configs
from murmuration.worker.config import Config
from murmuration.worker.errors import CheckpointError, UsageError
from murmuration.worker.manifest import Manifest, check_local
from murmuration.worker.training.model import DTYPES

_TENSORS = "tensors.safetensors"
MANIFEST = "manifest.json"
_PIECE_BYTES = 1 << 20
_KEY_BYTES = 32
_EARLIER = "-earlier-"
_BEFORE = "-before"  # a checkpoint that one of the same step is just replacing
_PARAMETERS = ("anchor/", "local/")
_KINDS = {"step": int, "position": int, "stream": str, "manifest": dict}
_KINDS |= {"states": list, "buffers": list}
_NAME = re.compile(rf"step-(\d{{8,}})({_BEFORE}|)")


@dataclass(frozen=True)
class Checkpoint:
    """Tensors by kind and name, such as `anchor/layers.0.w`, and plain values: step, cursor,
    versions, the run's manifest. docs/commands.md has the layout."""

    path: Path
    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any]

    def named(self, kind: str) -> dict[str, Tensor]:
        prefix = f"{kind}/"
        kept = (item for item in self.tensors.items() if item[0].startswith(prefix))
        return {name.removeprefix(prefix): values for name, values in kept}


def save(folder: Path, step: int, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> Path:
    """Writes a checkpoint, durable when this returns; the earlier ones still stand where it raises
    OSError. any thread, one at a time."""
    final, partial = folder / f"step-{step:08d}", folder / f".partial-{step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(".partial-*"):  # by a kill in the middle of an earlier save
        _remove(left)
    try:
        partial.mkdir()
        written = write_tensors(partial / _TENSORS, tensors)
        record = {**values, "mark": _mark(values.get("manifest")), "tensors": written}
        sealed = {"record": record, "xxh3_128": _record_hash(record)}
        write_atomically(partial / MANIFEST, json.dumps(sealed, indent=1).encode())
        sync_folder(partial)
    except Exception:  # what there is of it would keep a full disk full
        _remove(partial)
        raise
    before = final.with_name(final.name + _BEFORE)
    if final.exists():  # the same step, written before a restart
        _remove(before)
        final.rename(before)
    partial.rename(final)
    sync_folder(folder)
    _remove(before)
    return final


def _remove(path: Path) -> None:
    """Removes what has a checkpoint's name, if it is there: a folder, or a pipe in its place."""
    with suppress(OSError):
        folder = path.is_dir() and not path.is_symlink()
        shutil.rmtree(path, ignore_errors=True) if folder else path.unlink()


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, object]:
    """Writes a safetensors file, durable when this returns; its size and hash. Raises OSError.

    The library's own function copies all tensors and holds Python's lock meanwhile, so that
    training stands still. This writes them in pieces, without it."""
    named = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, object] = {}
    end = 0
    for name, tensor in named:
        begin, end = end, end + tensor.numel() * tensor.element_size()
        kind = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape)}
        header[name] = {**kind, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # what follows is aligned
    whole, size = xxhash.xxh3_128(), 0
    with path.open("wb", buffering=0) as file:
        head = memoryview(len(text).to_bytes(8, "little") + text)
        flat = (each.detach().cpu().contiguous().view(-1).view(torch.uint8) for _, each in named)
        for content in itertools.chain((head,), (each.numpy().data for each in flat)):
            size += len(content)
            for begin in range(0, len(content), _PIECE_BYTES):
                left = content[begin : begin + _PIECE_BYTES]
                whole.update(left)
                while left:  # a disk that is about to be full takes a part
                    left = left[file.write(left) :]
        os.fsync(file.fileno())
    return {"bytes": size, "xxh3_128": whole.hexdigest()}


def below(run: Path, *, whole: bool = False) -> Iterator[Checkpoint]:
    """Finds the newest usable checkpoint of every folder of them below `run`, none set aside; or
    that of a `whole` model with the highest step. What is damaged is told on stderr."""
    steps = (path.parent for path in run.glob("**/step-*") if path.is_dir())
    found = [_newest_first(at) for at in sorted({at for at in steps if _EARLIER not in at.name})]
    if whole:
        paths = [path for each in found for path in each if _stage_in(path) is None]
        names = newest_first({path.name for path in paths})
        found = [[path for name in names for path in paths if path.name == name]]
    for each in found:
        saved, problems = _newest_whole(each)
        for problem in problems:
            print(f"warning: {problem}", file=sys.stderr)
        if saved is not None:
            yield saved


def config_of(saved: Checkpoint, settings: Iterable[str] = ()) -> Config:
    """Makes the config of its run. Args: settings: of [task], as typed: they replace what it says.
    Raises as `parse_config`; UsageError; unless this user has written it here, as `check_local`:
    what loads code or reads files must be among the settings."""
    typed, _ = configs.read_all(None, settings, {})
    for section in typed:
        if section != "task":
            raise UsageError(f"--set {section}: of a checkpoint only settings of [task] are taken")
    manifest, mark, where = saved.values["manifest"], saved.values.get("mark"), str(saved.path)
    run = Manifest(manifest).sections
    task = {**run.get("task", {}), **typed.get("task", {})}
    config = configs.parse_config({**run, "task": task}, where)
    own = isinstance(mark, str) and mark != "" and hmac.compare_digest(mark, _mark(manifest))
    if not own:
        check_local(config, typed, where, trains=False)
    return config


def _mark(manifest: object) -> str:
    """Tells this user's checkpoints from those of others, which may not name code to load: a keyed
    hash of what the run is. Its key never leaves this machine. Empty where there can be no key."""
    try:
        key = _key(Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"))
    except (OSError, RuntimeError):  # no home, or none that can be written to
        return ""
    return hashlib.blake2b(canonical(manifest), key=key, digest_size=16).hexdigest()


def _key(state: Path) -> bytes:
    """Made once, readable by this user alone; another one where others can. Raises OSError."""
    path = state / "murmuration" / "checkpoint-key"
    if os.name == "posix" and path.exists() and path.stat().st_mode & 0o007:
        path.unlink()
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, made = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(os.urandom(_KEY_BYTES))
        with suppress(FileExistsError):  # another process was faster
            os.link(made, path)
        os.unlink(made)
    key = path.read_bytes()
    if len(key) != _KEY_BYTES:
        raise OSError(f"{path} is damaged")
    return key


def prune(folder: Path, keep: int, spared: Path | None = None, last: Path | None = None) -> None:
    """Removes all but the newest `keep` checkpoints and `spared`, which somebody reads. Args: last:
    the newest of this run: what claims to be later is nobody's, and counts for none."""
    found = _newest_first(folder)
    for old in found[keep + (found.index(last) if last in found else 0) :]:
        if old != spared:
            _remove(old)


def any_in(folder: Path) -> bool:
    return any(_newest_first(folder))


def set_aside(folder: Path) -> Path | None:
    """Renames a folder of checkpoints, so that a new run does not mix with it, if it has any."""
    if not any_in(folder):
        return None
    names = (folder.with_name(f"{folder.name}{_EARLIER}{n}") for n in itertools.count(1))
    return folder.rename(next(name for name in names if not name.exists()))


def load(folder: Path) -> tuple[Checkpoint, list[str]]:
    """Loads the newest that is whole, with a line for each newer one that is not. Raises
    CheckpointError: there is none."""
    saved, problems = _newest_whole(_newest_first(folder))
    if saved is not None:
        return saved, problems
    detail = f" ({problems[0]})" if problems else ""
    raise CheckpointError(
        f"{folder}: no usable checkpoint{detail}; start from step 0 with --fresh "
        "(murmur swarm: without --resume), or name another --out"
    )


def _newest_whole(found: Sequence[Path]) -> tuple[Checkpoint | None, list[str]]:
    problems = list[str]()
    for path in found:
        try:
            return load_one(path), problems
        except CheckpointDamaged as error:
            back = "" if path == found[-1] else "; going back to the one before"
            problems.append(f"{path}: {error}{back}")
    return None, problems


def _stage_in(path: Path) -> object:
    with suppress(CheckpointDamaged):
        return _load_values(path).get("stage")
    return None


def held_stage(folder: Path) -> int | None:
    """Finds the stage that the newest checkpoint is of, by its manifest; None for a whole model."""
    stages = map(_stage_in, _newest_first(folder))
    return next((stage for stage in stages if isinstance(stage, int)), None)


class CheckpointDamaged(Exception):
    """Says what is wrong with one checkpoint."""


def load_one(path: Path) -> Checkpoint:
    values, file = _load_values(path), path / _TENSORS
    try:
        expected = values["tensors"]
        if not file.is_file():
            raise CheckpointDamaged(f"unreadable: {_TENSORS} is no ordinary file")
        if (size := file.stat().st_size) != expected["bytes"]:
            raise CheckpointDamaged(f"cut short: {size} of {expected['bytes']} bytes")
        with file.open("rb") as content:
            if hashlib.file_digest(content, xxhash.xxh3_128).hexdigest() != expected["xxh3_128"]:
                raise CheckpointDamaged("damaged: its hash differs")
        tensors = load_file(file)
        own = {f"local/{name}" for name in values.get("buffers", ())}  # a peer's, whatever it is
        for name, held in tensors.items():  # from such parameters nobody can train
            floats = held.is_floating_point() and held.element_size() > 1
            checked = name.startswith(_PARAMETERS) and name not in own
            if checked and floats and bool(held.isnan().any()):
                raise CheckpointDamaged(f"{name} has values that are no numbers")
        return Checkpoint(path, tensors, values)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointDamaged(f"unreadable: {error}") from error


def _load_values(path: Path) -> dict[str, Any]:
    try:
        sealed = read_json(path / MANIFEST)
        values: dict[str, Any] = sealed["record"]
        if _record_hash(values) != sealed["xxh3_128"]:
            raise CheckpointDamaged("its manifest is damaged: the hash differs")
        for key, kind in _KINDS.items():
            if type(values.get(key, kind())) is not kind:
                raise CheckpointDamaged(f"unreadable: {key} is no {kind.__name__}")
        return values
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointDamaged(f"unreadable: {error}") from error


def _record_hash(record: object) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(record).encode())


def newest_first(names: Iterable[str]) -> list[str]:
    """The names of checkpoints among these, that of the last step first."""
    named = [(_NAME.fullmatch(name), name) for name in names]
    ours = [(int(match[1]), match[2] == "", name) for match, name in named if match]
    return [name for *_, name in sorted(ours, reverse=True)]


def _newest_first(folder: Path) -> list[Path]:
    return [folder / name for name in newest_first(path.name for path in folder.glob("step-*"))]
