"""Asks any worker or coordinator how the swarm is."""

import time
from typing import TYPE_CHECKING, Any

from coordinator.errors import Failure
from protos.documents import STATUS_BYTES, BadDocument, unpack
from protos.exit_codes import ExitCode

if TYPE_CHECKING:
    import grpc

TIMEOUT_S = 10.0
_TOLD_S = 0.05  # what took less was refused at once
_OPTIONS = (
    ("grpc.enable_http_proxy", 0),  # peers are reached directly
    ("grpc.enable_retries", 0),
    ("grpc.max_receive_message_length", 4 * 1024 * 1024),
)


def ask(address: str, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """The status document of whoever answers at `address`: a worker, else a coordinator.

    Raises:
        Failure: nobody answered in time, or not with a status; says what was tried.
    """
    import grpc

    from protos import murmuration_pb2 as pb
    from protos import murmuration_pb2_grpc as rpc

    began_s = time.monotonic()
    with grpc.insecure_channel(address, options=_OPTIONS) as channel:
        for stub in (rpc.ControlStub(channel), rpc.CoordinatorStub(channel)):
            left_s = max(0.1, timeout_s - (time.monotonic() - began_s))
            try:
                reply = stub.Status(pb.StatusRequest(), timeout=left_s)
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    continue
                raise Failure(
                    _unreachable(address, error, time.monotonic() - began_s), ExitCode.UNREACHABLE
                ) from error
            try:
                return unpack(reply.document, STATUS_BYTES)
            except BadDocument as error:
                raise Failure(
                    f"{address} answers, but not with a status: {error}", ExitCode.UNREACHABLE
                ) from error
    raise Failure(
        f"{address} answers, but is neither a worker nor a coordinator (tried Control/Status and "
        "Coordinator/Status); is the port right?",
        ExitCode.UNREACHABLE,
    )


def _unreachable(address: str, error: "grpc.RpcError", waited_s: float) -> str:
    details = " ".join((error.details() or "no details").split())
    cause = details.rpartition(": ")[2]  # gRPC puts the chain of its inner errors before it
    waited = f" for {waited_s:.1f} s" if waited_s >= _TOLD_S else ""
    return (
        f"{address} does not answer: tried Control/Status{waited} "
        f"({error.code().name.lower()}: {cause}); is it running, is the port right, "
        "does a firewall stand between?"
    )
