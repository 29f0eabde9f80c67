"""The manifest: all that the peers of one run must have in common. Its hash names the run.

Beside that it carries advice, in which peers may differ: a joiner takes it or says otherwise.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from murmuration.algorithms.fragments import TensorSpec
from murmuration.protos.documents import MANIFEST_BYTES, pack
from murmuration.protos.manifest import agreed, in_key_order, run_hash
from murmuration.worker.config import ADVISED, RUN_WIDE, Config, parse_config, to_document
from murmuration.worker.wire import WireError, unpack_document

PROTOCOL = 9


@dataclass(frozen=True)
class Manifest:
    """Plain nested values: protocol, run, task, inner, diloco, tensors (name -> shape), advice."""

    document: Mapping[str, Any]

    @classmethod
    def of(cls, config: Config, schema: Sequence[TensorSpec]) -> "Manifest":
        document = to_document(config)
        advice = {name: {key: document[name].pop(key)} for name, key in ADVISED}
        tensors = {spec.name: list(spec.shape) for spec in schema}
        return cls({"protocol": PROTOCOL, **document, "tensors": tensors, "advice": advice})

    @classmethod
    def unpack(cls, raw: bytes) -> "Manifest":
        """Raises WireError when the bytes are no manifest."""
        document = unpack_document(raw, MANIFEST_BYTES)
        if not isinstance(document.get("protocol"), int):
            raise WireError("not a manifest")
        return cls(document)

    def plain(self) -> dict[str, Any]:
        """Nested dicts, lists and scalars, keys sorted."""
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
        """What all peers of the run have in common."""
        return agreed(self.document)

    @property
    def lasting(self) -> dict[str, Any]:
        """What a run has in common with one that goes on from its state: it may be longer."""
        run = {key: value for key, value in self.document["run"].items() if key != "steps"}
        return {**self.agreed, "run": run}

    @property
    def steps(self) -> int:
        """Inner steps of the run."""
        steps: int = self.document["run"]["steps"]
        return steps

    @property
    def elements(self) -> int:
        """Of the whole model, however it is cut."""
        return sum(math.prod(shape) for shape in self.document["tensors"].values())

    @property
    def sections(self) -> dict[str, Any]:
        """The run-wide sections of the TOML, with the advice in its place."""
        found = {name: self.document[name] for name in RUN_WIDE if name in self.document}
        advice = self.document.get("advice")
        for name, key in ADVISED:
            advised = advice.get(name) if isinstance(advice, Mapping) else None
            if isinstance(advised, Mapping) and isinstance(found.get(name), Mapping):
                found[name] = {**found[name], **{k: v for k, v in advised.items() if k == key}}
        return found

    def config(self, source: str) -> Config:
        """The run-wide settings. Raises ConfigError."""
        return parse_config(self.sections, source)
