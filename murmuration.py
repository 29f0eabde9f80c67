"""Murmuration as a library: one model trained by machines that are only loosely connected.

    import murmuration

    with murmuration.Swarm(model, optimizer, join="one.example:7700") as swarm:
        for batch in swarm.shard(loader):
            ...

See docs/library.md.
"""

from worker.errors import (
    ConfigError,
    ManifestRefused,
    MurmurError,
    PeersUnreachable,
    UsageError,
)
from worker.library.swarm import Swarm

__all__ = [
    "ConfigError",
    "ManifestRefused",
    "MurmurError",
    "PeersUnreachable",
    "Swarm",
    "UsageError",
]
