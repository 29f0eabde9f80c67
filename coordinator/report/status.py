"""Asks any worker or coordinator how the swarm is, and shows the answer.

Facts come first, then what was sent and received, then a table of each list.

Documents grow with the versions of workers: what is not known here is shown all the same, in the
units that the names of its keys tell (`_bytes`, `_s`, `_ms`, `_mbps`).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from coordinator import Failure
from protos.addresses import is_loopback
from protos.documents import STATUS_BYTES, BadDocument, unpack
from protos.events import float_of, names_of, printable, verdict_words
from protos.exit_codes import ExitCode
from protos.figures import duration, size
from protos.reach import (
    CHECK_ADDRESS,
    ENCRYPTED_RUN,
    Mismatch,
    UnknownName,
    is_encrypted_run,
    mismatch,
    plain_cause,
    target_of,
)
from protos.text import shown as cut

if TYPE_CHECKING:
    import grpc
    from rich.console import Console
    from rich.table import Table

    from protos.identity import Identity


TIMEOUT_S = 10.0
_MAX_TEXT = 300  # characters that a peer has written
_FOR_PROGRAMS = ("recent_rounds", "waiting_s")  # the page draws them
_TOLD_S = 0.05  # what took less was refused at once
_OPTIONS = (
    ("grpc.enable_http_proxy", 0),  # peers are reached directly
    ("grpc.enable_retries", 0),
    ("grpc.max_receive_message_length", 4 * 1024 * 1024),
)


def ask(
    address: str,
    timeout_s: float = TIMEOUT_S,
    identity: "Identity | None" = None,
    only: str = "",
) -> dict[str, Any]:
    """The status document of the worker or coordinator that answers at `address`.

    Args:
        identity: of a member of the run; None where it is not encrypted.
        only: a key of the document, of which nothing else is wanted.

    Raises:
        Failure: nobody answered in time, or not with a status; says what was tried.
    """
    import grpc

    from protos import murmuration_pb2 as pb
    from protos import murmuration_pb2_grpc as rpc

    began_s = time.monotonic()
    try:
        target = target_of(address)
    except UnknownName as error:
        raise Failure(
            f"{address} does not answer: {error}; {CHECK_ADDRESS}", ExitCode.UNREACHABLE
        ) from error
    with _channel(target, identity) as channel:
        for stub in (rpc.ControlStub(channel), rpc.CoordinatorStub(channel)):
            left_s = max(0.1, timeout_s - (time.monotonic() - began_s))
            try:
                reply = stub.Status(pb.StatusRequest(only=only), timeout=left_s)
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    continue
                waited_s = time.monotonic() - began_s
                raise _failed(address, error, waited_s, secure=identity is not None) from error
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


def _channel(target: str, identity: "Identity | None") -> "grpc.Channel":
    import grpc

    if identity is None:
        return grpc.insecure_channel(target, options=_OPTIONS)
    credentials = grpc.ssl_channel_credentials(
        identity.authority, identity.key, identity.certificate
    )
    name = ("grpc.ssl_target_name_override", identity.server_name(None))
    return grpc.secure_channel(target, credentials, options=(*_OPTIONS, name))


def _failed(address: str, error: "grpc.RpcError", waited_s: float, *, secure: bool) -> Failure:
    """What a call that failed means."""
    details = printable(" ".join((error.details() or "").split()))
    why = mismatch(details, encrypts=secure)
    if why is not None:
        if why is Mismatch.NOT_ENCRYPTED:
            told = f"{address} does not encrypt: ask it without --run"
        elif secure:
            told = f"{address} is of another run than the folder that --run names"
        elif is_encrypted_run(address):
            told = f"{address}: {ENCRYPTED_RUN}"
        else:
            told = f"{address} closes the connection, and is no worker; is the port right?"
            return Failure(told, ExitCode.UNREACHABLE)
        return Failure(told, ExitCode.NOT_ADMITTED)
    waited = f" for {waited_s:.1f} s" if waited_s >= _TOLD_S else ""
    cause = cut(plain_cause(error.code().name, details), _MAX_TEXT)
    return Failure(
        f"{address} does not answer: tried Control/Status{waited} ({cause}); {CHECK_ADDRESS}",
        ExitCode.UNREACHABLE,
    )


Document = Mapping[str, Any]
Show = Callable[[float], str]

_SHORT_S = 60
_WAYS = ("sent", "received")
_UNITS = ("bytes", "ms", "s", "mbps")
_PER_S = "_per_s"


def print_status(document: Document, console: "Console") -> None:
    """Prints whatever the document holds; no key but `members` is expected."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    document = {key: value for key, value in document.items() if key not in _FOR_PROGRAMS}
    for label, value in fact_lines(document):
        facts.add_row(label, Text(value))
    console.print(Padding(facts, (0, 0, 0, 2), expand=False))
    if rows := traffic_rows(document):
        console.print(_table("traffic", rows))
    for key, value in document.items():
        if _is_table(value) and key not in ("verdicts", "warnings"):
            console.print(_table(_words(key), value))
    for text in names_of(document, "warnings"):
        console.print(f"warning: {text}", markup=False, soft_wrap=True)
    for verdict in document.get("verdicts") or ():
        console.print(f"slow: {verdict_words(verdict)}", markup=False, soft_wrap=True)
    if not document.get("members"):
        console.print("no members are known yet")
    if document.get("encrypted") is False and not _on_one_machine(document):
        console.print(
            "warning: nothing is encrypted (--insecure): others can read along, and anybody that "
            "reaches a port may join",
            soft_wrap=True,
        )


def _on_one_machine(document: Document) -> bool:
    """Whether the addresses of all members are of this machine alone."""
    addresses = [str(each.get("address", "")) for each in document.get("members") or []]
    return all(is_loopback(each.rpartition(":")[0].strip("[]")) for each in addresses)


def fact_lines(document: Document) -> list[tuple[str, str]]:
    """(label, value) of what is no table."""
    facts = {key: value for key, value in document.items() if not _is_table(value)}
    for name in (
        "members",
        "verdicts",
        "warnings",
        "measured",
    ):  # unknown, told below, for programs
        facts.pop(name, None)
    if facts.get("step") is not None and facts.get("steps") is not None:
        facts["step"] = f"{shown('step', facts['step'])} of {shown('steps', facts.pop('steps'))}"
    if isinstance(traffic := facts.pop("traffic", None), Mapping):
        facts |= {f"traffic_{key}": traffic[key] for key in traffic if _flow(key) is None}
    return [
        (f"{_words(key)} a second" if key.endswith("_per_s") else _words(key), shown(key, value))
        for key, value in facts.items()
    ]


def traffic_rows(document: Document) -> list[dict[str, object]]:
    """What went each way: in all, of it payload, and by method, the most first; with the mean rate
    where the document says since when."""
    traffic = document.get("traffic")
    if not isinstance(traffic, Mapping):
        return []
    flows: dict[str, dict[str, float]] = {}
    for key, value in traffic.items():
        if (flow := _flow(key)) is not None:
            name, way = flow
            counts = value if isinstance(value, Mapping) else {name: value}
            for each in counts:
                flows.setdefault(str(each), {})[way] = float_of(counts, each) or 0.0
    up_s = float_of(document, "up_s")
    rows: list[dict[str, object]] = []
    for name, sums in sorted(flows.items(), key=lambda flow: -sum(flow[1].values())):
        row: dict[str, object] = {"": name}
        row |= {f"{way}_bytes": sums.get(way, 0.0) for way in _WAYS}
        if up_s:
            row |= {f"mean_{way}_mbps": 8e-6 * sums.get(way, 0.0) / up_s for way in _WAYS}
        rows.append(row)
    return rows


def shown(key: str, value: object, unit: Show | None = None) -> str:
    """A value in one line, in the unit of its key, else in that of what it is in."""
    unit = _unit(key) or unit
    if isinstance(value, Mapping):
        return ", ".join(_pair(str(k), v, unit) for k, v in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(shown(key, item, unit) for item in value) or "none"
    if value is None:
        return "-"
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, int | float) and not isinstance(value, bool):
        if unit is not None:
            return unit(value)
        return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
    return cut(str(value), _MAX_TEXT)


def _flow(key: object) -> tuple[str, str] | None:
    """Of a key of `traffic`: the row and the column it is for; None of one that is not known."""
    for way in _WAYS:
        if key == f"{way}_by_method":
            return "", way
        if key == f"bytes_{way}":
            return "in all", way
        if str(key).endswith(f"_bytes_{way}"):
            return _words(str(key).removesuffix(f"_{way}")), way
    return None


def _pair(key: str, value: object, unit: Show | None) -> str:
    inner = shown(key, value, unit)
    return f"{_words(key)} ({inner})" if isinstance(value, Mapping) else f"{_words(key)} {inner}"


def _is_table(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, Mapping) for v in value)


def _table(title: str, rows: Sequence[Document]) -> "Table":
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", title_style="dim", box=box.SIMPLE_HEAD)
    cells: list[list[Text]] = []
    for column in dict.fromkeys(key for row in rows for key in row):
        values = [row.get(column) for row in rows]
        rounds = column == "versions"  # of each fragment, how many are closed
        numeric = rounds or all(isinstance(value, int | float | None) for value in values)
        table.add_column(
            "round" if rounds else _words(column),
            justify="right" if numeric else "left",
            no_wrap=True,
        )
        cells.append([Text(_span(v) if rounds else shown(column, v)) for v in values])
    for row_cells in zip(*cells, strict=True):
        table.add_row(*row_cells)
    return table


def _span(versions: object) -> str:
    """`4`, or `4 to 5` of fragments that are not equally far."""
    numbers = versions if isinstance(versions, list) else []
    ends = dict.fromkeys((min(numbers), max(numbers))) if numbers else {}
    return " to ".join(shown("round", end) for end in ends) or "-"


def _unit(key: str) -> Show | None:
    parts = key.split("_")
    if key.endswith(_PER_S):
        return lambda value: f"{value:,.4g}/s" if value < 1000 else f"{value:,.0f}/s"
    if "bytes" in parts:
        return size
    if "mbps" in parts:
        return lambda value: f"{value:,.2f} Mbit/s"
    if "ms" in parts:
        return lambda value: f"{value:,.1f} ms"
    if "s" in parts:
        return _seconds
    return (lambda value: f"{value:.3f}") if "loss" in parts else None


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < _SHORT_S else duration(seconds)


def _words(key: str) -> str:
    """`bytes_sent` as people say it; units stand with the values."""
    parts = key.removesuffix(_PER_S).split("_")
    return printable(" ".join(part for part in parts if part not in _UNITS))
