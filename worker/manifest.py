"""The manifest: all that the peers of one run must have in common. Its hash names the run.

It also carries advice, in which peers may differ: a joiner takes it or says otherwise. What others,
or a checkpoint, say of the run holds for every peer. Code that they name is loaded, and files are
read, only where the user of this machine has named them too.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from murmuration.algorithms.fragments import TensorSpec
from murmuration.protos.documents import MANIFEST_BYTES, agreed, in_key_order, pack, run_hash
from murmuration.protos.figures import shown
from murmuration.worker import config as configs
from murmuration.worker.config import RUN_WIDE, Config
from murmuration.worker.tasks import OWN_LOOP, TaskError, local_settings
from murmuration.worker.wire import WireError, unpack_document

PROTOCOL = 15


@dataclass(frozen=True)
class Manifest:
    """Plain nested values: protocol, the run-wide sections, tensors (name -> shape), advice."""

    document: Mapping[str, Any]

    @classmethod
    def of(cls, config: Config, schema: Sequence[TensorSpec]) -> "Manifest":
        document = configs.to_document(config)
        kinds = [f"{each.name} {each.averaged} {each.integers}" for each in schema]
        advice: dict[str, dict[str, Any]] = {"tensors": {"order": run_hash({"kinds": kinds})}}
        for name, key in configs.ADVISED:
            advice.setdefault(name, {})[key] = document[name].pop(key)
        tensors = {spec.name: list(spec.shape) for spec in schema}
        return cls({"protocol": PROTOCOL, **document, "tensors": tensors, "advice": advice})

    @classmethod
    def unpack(cls, raw: bytes) -> "Manifest":
        """Raises WireError: the bytes are no manifest."""
        document = unpack_document(raw, MANIFEST_BYTES)
        if not isinstance(document.get("protocol"), int):
            raise WireError("not a manifest")
        return cls(document)

    def plain(self) -> dict[str, Any]:
        plain: dict[str, Any] = in_key_order(self.document)
        return plain

    def pack(self) -> bytes:
        return pack(self.plain())

    @property
    def run(self) -> int:
        """64 bits that name the run."""
        return run_hash(self.document)

    @property
    def agreed(self) -> dict[str, Any]:
        return agreed(self.document)

    @property
    def lasting(self) -> dict[str, Any]:
        """The part that a run shares with one that goes on from it: no steps, no protocol."""
        run = {key: value for key, value in self.document["run"].items() if key != "steps"}
        rest = {key: value for key, value in self.agreed.items() if key != "protocol"}
        return {**rest, "run": run}

    @property
    def _advice(self) -> Mapping[str, Any]:
        advice = self.document.get("advice")
        return advice if isinstance(advice, Mapping) else {}

    def other_order(self, other: "Manifest") -> str | None:
        """Says so if the other tells that its tensors are of other kinds, or in another order."""
        own, theirs = (each._advice.get("tensors") for each in (self, other))
        if theirs in (None, own):
            return None
        return "tensors: in another order (of a set?) or of other types"

    @property
    def steps(self) -> int:
        steps: int = self.document["run"]["steps"]
        return steps

    @property
    def sections(self) -> dict[str, Any]:
        """The run-wide sections of the TOML, with the advice in its place."""
        found = {name: self.document[name] for name in RUN_WIDE if name in self.document}
        for name, key in configs.ADVISED:
            advised = self._advice.get(name)
            if isinstance(advised, Mapping) and isinstance(found.get(name), Mapping):
                found[name] = {**found[name], **{k: v for k, v in advised.items() if k == key}}
        return found


def check_local(
    config: Config, typed: Mapping[str, Any], where: str, *, trains: bool = True
) -> None:
    """Code is loaded and files are read if the user has named them, never on the word of others.
    Raises TaskError: names the first setting that the user has to type. Args: typed: sections that
    the user wrote; trains: whether the inner optimizer and the initial values are needed."""
    task, inner = config.task, config.inner.optimizer
    settings: list[tuple[str, str, object]] = [
        ("task", key, {"name": task.name, **task.options}.get(key))
        for key in local_settings(task.name, task.options)
    ]
    if trains and task.name != OWN_LOOP:
        if ":" in inner:
            settings.append(("inner", "optimizer", inner))
        if task.init and Path(task.init).exists():
            settings.append(("task", "init", task.init))
    for section, key, value in settings:
        if key in typed.get(section, {}):
            continue
        what = "run code" if key in ("name", "optimizer") else "read files"
        plain = isinstance(value, str) and value == shown(value)
        typing = shlex.quote(f"{section}.{key}={value}") if plain else f"{section}.{key}=..."
        instead = " (or --set 'task.init=\"\"' to take the values from the others)"
        raise TaskError(
            f"{where}: [{section}] {key} = {shown(repr(value))} would {what} of this machine, and "
            f"only others have named it: if you trust it, add --set {typing}"
            f"{instead if key == 'init' else ''}"
        )
