"""`murmur doctor`: whether this machine can be a peer, and of which it cannot, what to do."""

import asyncio
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from protos.addresses import is_loopback, is_wildcard, join_address, split_address
from protos.exit_codes import ExitCode
from protos.identity import Identity
from worker.errors import ConfigError, MurmurError, UsageError

if TYPE_CHECKING:
    from worker.manifest import Manifest
    from worker.membership.first_contact import FirstAnswer
    from worker.transport import Caller, Stream, Transport

_NAME = "doctor"
_CALL_S = 3.0
_FILES = 1024
_DISK_BYTES = 2 << 30
_MEMORY_BYTES = 1 << 30
_SKEW_S = 60.0


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: `fix` says what to do where it is not `ok`."""

    about: str
    ok: bool
    found: str
    fix: str = ""


@click.command()
@click.argument("address", metavar="[HOST:PORT]", required=False)
@click.option(
    "--listen", default="0.0.0.0:7700", show_default=True, help="HOST:PORT, as for a worker."
)
@click.option("--advertise", help="HOST:PORT that others reach this peer at.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("runs/worker"),
    help="Of the worker; a certificate in it is used.",
)
@click.option("--json", "as_json", is_flag=True, help="The findings as JSON.")
def doctor(
    address: str | None, listen: str, advertise: str | None, out: Path, as_json: bool
) -> int:
    """Say whether this machine can join the swarm at HOST:PORT, and if not, what to do.

    Looks at the machine alone without one. Ends with 0 if nothing is wrong, with 1 otherwise.
    """
    for each in filter(None, (address, listen, advertise)):
        try:
            split_address(each)
        except ValueError as error:
            raise UsageError(str(error)) from error
    identity = Identity.load(out)  # a run that is encrypted answers nobody else
    findings = [*_machine(out), *_network(address, listen, advertise, identity)]
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        for finding in findings:
            click.echo(_line(finding))
    return 0 if all(finding.ok for finding in findings) else ExitCode.FAILED


def _line(finding: Finding) -> str:
    said = f"{finding.about}: {' '.join(finding.found.split())}"
    return f"ok   {said}" if finding.ok else f"BAD  {said}; {finding.fix}"


# ------------------------------------------------------------------------------------ the machine


def _machine(out: Path) -> Iterator[Finding]:
    yield _files()
    there = next(folder for folder in (out, *out.resolve().parents) if folder.exists())
    free = shutil.disk_usage(there).free
    yield Finding(
        "disk", free >= _DISK_BYTES, f"{free / 1e9:.1f} GB free at {there}",
        "make room for checkpoints, or choose another --out",
    )  # fmt: skip
    if (memory := _memory_bytes()) is not None:
        yield Finding(
            "memory", memory >= _MEMORY_BYTES, f"{memory / 1e9:.1f} GB available",
            "end something else, or take a smaller --model",
        )  # fmt: skip
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    yield Finding("device", True, f"{device}, torch {torch.__version__}")


def _files() -> Finding:
    try:
        import resource
    except ImportError:  # no such limit there
        return Finding("open files", True, "no limit")
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = soft == resource.RLIM_INFINITY
    return Finding(
        "open files", unlimited or soft >= _FILES, "no limit" if unlimited else f"at most {soft}",
        f"allow {_FILES} with `ulimit -n {_FILES}`, or LimitNOFILE= in a systemd unit",
    )  # fmt: skip


def _memory_bytes() -> int | None:
    """Available; None where the system does not say it in Linux's way."""
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


# ------------------------------------------------------------------------------------ the network


def _network(
    address: str | None, listen: str, advertise: str | None, identity: Identity | None
) -> Iterator[Finding]:
    from worker.addresses import find_host
    from worker.membership.first_contact import fetch_manifest
    from worker.transport.grpc import GrpcTransport

    first: FirstAnswer | None = None
    if address is not None:
        began = time.monotonic()
        try:
            first = fetch_manifest(address, _CALL_S, security=identity)
        except MurmurError as error:
            yield Finding("the peer", False, str(error), "see there")
        else:
            took_ms = 1000 * (time.monotonic() - began)
            yield Finding("the peer", True, f"{address} answers after {took_ms:.0f} ms")
            yield from _run(first, address)
    try:
        found = None if advertise else find_host(
            listen, [address] if address else [], first.seen_from if first else ""
        )  # fmt: skip
    except ConfigError as error:
        yield Finding("address", False, str(error), "see there")
        return
    host, port = split_address(advertise or listen)
    if is_wildcard(host) and advertise:
        yield Finding("address", False, f"nobody can dial {advertise}", "name a host")
        return
    where = join_address(found.host if found else host, port)
    origin = f", {found.origin}" if found else ""
    near = ", which only this machine reaches" if is_loopback(split_address(where)[0]) else ""
    yield Finding("address", True, f"{where}{origin}{near}")
    if first is not None and address is not None and not first.coordinated:
        transport = GrpcTransport(listen, security=identity)
        yield asyncio.run(_dialled_back(transport, address, where, first.manifest))


def _run(first: "FirstAnswer", address: str) -> Iterator[Finding]:
    from worker.adopted_config import join_config
    from worker.manifest import PROTOCOL

    theirs = first.manifest.document["protocol"]
    yield Finding(
        "version", theirs == PROTOCOL, f"protocol {PROTOCOL} here, {theirs} there",
        "install the version that they run",
    )  # fmt: skip
    try:
        join_config(first.manifest.sections, None, (), address)
    except Exception as error:
        from worker.cli import exit_code_of

        if exit_code_of(error) is None:
            raise
        yield Finding("the run", False, str(error), "see there")
    else:
        yield Finding("the run", True, f"{first.manifest.run:016x}")
    if first.time_ms:
        skew_s = first.time_ms / 1000 - time.time()
        yield Finding(
            "clock", abs(skew_s) <= _SKEW_S, f"{abs(skew_s):.0f} s apart from theirs",
            "set it, by NTP; training goes on all the same, but logs do not fit one another",
        )  # fmt: skip


async def _dialled_back(
    transport: "Transport", address: str, where: str, run: "Manifest"
) -> Finding:
    """Whether the peer reaches this machine: it is asked to dial a server that stands here for a
    moment."""
    from worker.membership import Member
    from worker.membership.first_contact import ask_to_dial
    from worker.transport import TransportError

    try:
        bound = await transport.listen(_Answers(run.run))
        host, port = split_address(where)
        target = join_address(host, port or split_address(bound)[1])
        me = Member(_NAME, target, time.time_ns() // 1_000_000)
        undialled = await ask_to_dial(transport, address, me, run.pack())
    except TransportError as error:
        return Finding("reached", False, str(error), "see there")
    finally:
        await transport.close()
    if undialled is None:
        return Finding("reached", False, f"{address} does not say", "try again, or ask another")
    return Finding(
        "reached", not undialled, f"{address} {'cannot dial' if undialled else 'dials'} {target}",
        "open that port, forward it, or say with --advertise HOST:PORT where others reach it",
    )  # fmt: skip


class _Answers:
    """Answers a probe as a peer of the run would."""

    def __init__(self, run: int) -> None:
        self._run = run

    async def on_call(self, method: str, request: bytes, caller: "Caller") -> bytes:
        from protos import murmuration_pb2 as pb

        return pb.GossipMessage(sender=_NAME, run=self._run).SerializeToString()

    async def on_stream(self, method: str, stream: "Stream", caller: "Caller") -> None:
        """Nothing is served here."""
