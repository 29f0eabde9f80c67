"""How bytes reach a peer. Nothing here knows what the bytes mean.

`base` is the interface, `grpc` the real thing, `memory` the same for tests: it counts bytes
the same way and can delay messages and cut links.
"""

from worker.transport.base import (
    CONTROL_METHODS,
    DATA_METHODS,
    NOBODY,
    AddressInUse,
    Caller,
    Handler,
    Refused,
    Security,
    Stream,
    Traffic,
    Transport,
    TransportError,
    Unreachable,
    Untrusted,
)

__all__ = [
    "CONTROL_METHODS",
    "DATA_METHODS",
    "NOBODY",
    "AddressInUse",
    "Caller",
    "Handler",
    "Refused",
    "Security",
    "Stream",
    "Traffic",
    "Transport",
    "TransportError",
    "Unreachable",
    "Untrusted",
]
