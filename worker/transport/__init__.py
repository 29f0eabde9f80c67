"""How bytes reach a peer. Nothing here knows what the bytes mean.

`base` is the interface, `grpc` the real thing, and `served` its serving side with the limits of
`limits`. Tests have one of their own, in memory.
"""

from murmuration.worker.transport.base import (
    CONTROL_METHODS,
    DATA_METHODS,
    NOBODY,
    RELAY_METHODS,
    AddressInUse,
    Busy,
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
    "RELAY_METHODS",
    "AddressInUse",
    "Busy",
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
