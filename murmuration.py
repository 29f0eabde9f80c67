"""Murmuration as a library: one model trained by machines that are only loosely connected.

    >>> import murmuration, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with murmuration.Swarm(model, optimizer, inner_steps=5, steps=10) as swarm:
    ...     while not swarm.done:
    ...         model(torch.ones(1, 2)).sum().backward()
    ...         optimizer.step()
    >>> swarm.metrics["rounds_completed"]
    2

Another peer has `join="one.example:7700"` there.

`murmuration.hf` and `murmuration.lightning` have a callback for their trainers each, and need the
extra of that name: `pip install 'murmuration[hf]'`. See docs/library.md.
"""

import importlib
import sys
from types import ModuleType

try:
    from murmuration.protos.identity import IdentityError
    from murmuration.worker.errors import (
        CheckpointError,
        ConfigError,
        ManifestRefused,
        MurmurError,
        NotDialled,
        PeersUnreachable,
        TaskError,
        TextError,
        UsageError,
    )
    from murmuration.worker.library.swarm import Swarm
    from murmuration.worker.library.terms import add_arguments
    from murmuration.worker.training.optimizers import Muon
    from murmuration.worker.transport import AddressInUse, TransportError
except ModuleNotFoundError as error:
    package = (error.name or "").partition(".")[0]
    if package not in ("algorithms", "protos", "worker"):
        raise
    there = sys.modules.get(package)
    place = getattr(there, "__file__", None) or next(
        iter(getattr(there, "__path__", ())), "nothing"
    )
    raise ImportError(
        f"murmuration needs its own package {package!r}, and {place} stands in its place: rename "
        "that, or start Python with -P, which leaves out the script's folder"
    ) from error

__all__ = [
    "AddressInUse",
    "CheckpointError",
    "ConfigError",
    "IdentityError",
    "ManifestRefused",
    "Muon",
    "MurmurError",
    "NotDialled",
    "PeersUnreachable",
    "Swarm",
    "TaskError",
    "TextError",
    "TransportError",
    "UsageError",
    "add_arguments",
]

_ADAPTERS = ("hf", "lightning")


def __getattr__(name: str) -> ModuleType:
    """The adapters, when they are first used."""
    if name not in _ADAPTERS:
        raise AttributeError(f"module 'murmuration' has no attribute {name!r}")
    try:
        return importlib.import_module(f"murmuration.worker.library.{name}")
    except ModuleNotFoundError as error:
        raise ImportError(
            f"murmuration.{name} needs {error.name}: pip install 'murmuration[{name}]'"
        ) from error
