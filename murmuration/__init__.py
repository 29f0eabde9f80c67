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
import os
from typing import TYPE_CHECKING

import murmuration.protos  # noqa: F401  # first: it decides what gRPC does around a fork

# Fresh memory for a fragment takes a third of the time in huge pages. torch reads this for its
# first tensor.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

if TYPE_CHECKING:
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
    from murmuration.worker.identity.certificates import IdentityError, NotValidNow
    from murmuration.worker.library.arguments import add_arguments
    from murmuration.worker.library.swarm import Swarm
    from murmuration.worker.training.optimizers import Muon
    from murmuration.worker.transport import AddressInUse, TransportError

__all__ = [
    "AddressInUse",
    "CheckpointError",
    "ConfigError",
    "IdentityError",
    "ManifestRefused",
    "Muon",
    "MurmurError",
    "NotDialled",
    "NotValidNow",
    "PeersUnreachable",
    "Swarm",
    "TaskError",
    "TextError",
    "TransportError",
    "UsageError",
    "add_arguments",
]

_ADAPTERS = ("hf", "lightning")
_ELSEWHERE = {  # than worker.errors
    "AddressInUse": "worker.transport",
    "IdentityError": "worker.identity.certificates",
    "Muon": "worker.training.optimizers",
    "NotValidNow": "worker.identity.certificates",
    "Swarm": "worker.library.swarm",
    "TransportError": "worker.transport",
    "add_arguments": "worker.library.arguments",
}


def __getattr__(name: str) -> object:
    """Loads a name when it is first used: the coordinator imports this package without torch."""
    if name in __all__:
        place = importlib.import_module("murmuration." + _ELSEWHERE.get(name, "worker.errors"))
        globals()[name] = getattr(place, name)
        return globals()[name]
    if name not in _ADAPTERS:
        raise AttributeError(f"module 'murmuration' has no attribute {name!r}")
    try:
        return importlib.import_module(f"murmuration.worker.library.{name}")
    except ModuleNotFoundError as error:
        raise ImportError(
            f"murmuration.{name} needs {error.name}: pip install 'murmuration[{name}]'"
        ) from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ADAPTERS})
