"""How bytes reach a peer. Nothing here knows what the bytes mean.

`interface` says what a transport is, `grpc` is the real thing, and `served` its serving side. Tests
have one of their own, in memory.
"""

from murmuration.worker.transport.interface import (
    CONTROL_METHODS,
    DATA_METHODS,
    NOBODY,
    RELAY_METHODS,
    WINDOW_BYTES,
    AddressInUse,
    Busy,
    Caller,
    Handler,
    Method,
    Refused,
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
    "WINDOW_BYTES",
    "AddressInUse",
    "Busy",
    "Caller",
    "Handler",
    "Method",
    "Refused",
    "Stream",
    "Traffic",
    "Transport",
    "TransportError",
    "Unreachable",
    "Untrusted",
]
