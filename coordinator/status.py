"""Asks any worker or coordinator how the swarm is, and shows the answer."""

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from coordinator.documents import BadDocument, unpack
from coordinator.errors import Exit, Failure
from coordinator.figures import megabytes
from coordinator.records import printable

if TYPE_CHECKING:
    import grpc
    from rich.console import Console

TIMEOUT_S = 10.0
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
                    _unreachable(address, error, time.monotonic() - began_s), Exit.UNREACHABLE
                ) from error
            try:
                return unpack(reply.document)
            except BadDocument as error:
                raise Failure(
                    f"{address} answers, but not with a status: {error}", Exit.UNREACHABLE
                ) from error
    raise Failure(
        f"{address} answers, but is neither a worker nor a coordinator (tried Control/Status and "
        "Coordinator/Status); is the port right?",
        Exit.UNREACHABLE,
    )


def _unreachable(address: str, error: "grpc.RpcError", waited_s: float) -> str:
    details = " ".join((error.details() or "no details").split())
    cause = details.rpartition(": ")[2]  # gRPC puts the chain of its inner errors before it
    return (
        f"{address} does not answer: tried Control/Status for {waited_s:.1f} s "
        f"({error.code().name.lower()}: {cause}); is it running, is the port right, "
        "does a firewall stand between?"
    )


def print_status(document: Mapping[str, Any], console: "Console") -> None:
    """Prints whatever the document holds: plain values, then tables of lists, nested values inline.

    Documents grow with the versions of workers, so no key but `members` is expected.
    """
    from rich.table import Table
    from rich.text import Text

    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    tables = {key: value for key, value in document.items() if _is_table(value)}
    for key, value in document.items():
        if key not in tables:
            facts.add_row(Text(_words(key)), Text(shown(key, value)))
    console.print(facts)
    for key, rows in tables.items():
        console.print(_table(_words(key), rows))
    if not document.get("members"):
        console.print("no members are known yet")


def shown(key: str, value: object) -> str:
    """A value in one line: bytes in MB, nested values as `key value` pairs."""
    if isinstance(value, Mapping):
        return ", ".join(_pair(str(k), v) for k, v in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(shown(key, item) for item in value) or "none"
    if value is None:
        return "-"
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, int | float) and not isinstance(value, bool):
        if "bytes" in key:
            return megabytes(value)
        return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
    return printable(str(value))


def _pair(key: str, value: object) -> str:
    inner = shown(key, value)
    return f"{_words(key)} ({inner})" if isinstance(value, Mapping) else f"{_words(key)} {inner}"


def _is_table(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, Mapping) for v in value)


def _table(title: str, rows: Sequence[Mapping[str, Any]]) -> "Any":
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    for column in columns:
        numeric = all(isinstance(row.get(column), int | float | None) for row in rows)
        table.add_column(_words(column), justify="right" if numeric else "left")
    for row in rows:
        table.add_row(*(Text(shown(column, row.get(column))) for column in columns))
    return table


def _words(key: str) -> str:
    """`bytes_sent` as people say it; units that `shown` writes out are left away."""
    return printable(key.replace("_bytes", "").replace("bytes_", "").replace("_", " "))
