"""`murmur doctor`: whether this machine can be a peer, and of which it cannot, what to do."""

import asyncio
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from murmuration.protos import addresses, murmuration_pb2 as pb
from murmuration.protos.addresses import public_address, split_address, with_port
from murmuration.protos.exit_codes import ExitCode
from murmuration.worker.cli.commands import WorkerFlags, addresses_and_run
from murmuration.worker.cli.options import RunFlags, options
from murmuration.worker.errors import MurmurError, PeersUnreachable, UsageError
from murmuration.worker.folder import is_taken
from murmuration.worker.identity.certificates import Identity, IdentityError
from murmuration.worker.membership import Member
from murmuration.worker.node.own_address import ROUTER, source_host
from murmuration.worker.node.supervision import allow_open_files, check_memory, memory_bytes
from murmuration.worker.transport import AddressInUse, Caller, Method, Stream, TransportError

if TYPE_CHECKING:
    from murmuration.worker.manifest import Manifest
    from murmuration.worker.node.admission import FirstAnswer
    from murmuration.worker.transport.grpc import GrpcTransport

_NAME = "doctor"
_OPEN = (
    "open that port, forward it, or say with --advertise HOST:PORT where others reach it; as it "
    "is, they reach it through relays"
)
_UNUSED = "fresh leave_on no_relay quiet relay_mbps reports resume stage threads track verbose"
_CALL_S = 3.0
_FILES = 1024
_DISK_BYTES = 2 << 30
_MEMORY_BYTES = 1 << 30
_RATE_S = 3.0
_BULK_CALLS, _BULK_BYTES = 8, 60_000  # at once, as many as a peer takes; bytes of each


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at, and `fix`, what to do where it is not `ok`."""

    about: str
    ok: bool
    found: str
    fix: str = ""

    @classmethod
    def refused(cls, about: str, error: Exception | str) -> "Finding":
        """Makes a finding of an error: what is wrong, then how to mend it."""
        found, _, fix = str(error).rpartition("; ")
        return cls(about, False, found or fix, fix if found else "")

    def __str__(self) -> str:
        said = f"{self.about}: {' '.join(self.found.split())}"
        return f"ok   {said}" if self.ok else f"BAD  {'; '.join(filter(None, (said, self.fix)))}"


@click.command()
@click.argument("words", metavar="[HOST:PORT] [RUN]", nargs=-1)
@click.option("--config", type=click.Path(path_type=Path), help="Give RUN as an option.")
@options("said", RunFlags)
@options("flags", WorkerFlags, _UNUSED)
def doctor(words: tuple[str, ...], config: Path | None, said: RunFlags, flags: WorkerFlags) -> int:
    """Say whether this machine can join the swarm at HOST:PORT, and if not, what to do.

    It takes what `murmur join` takes: type `doctor` in place of `join`. A token is tried, and not
    used up. Nothing is written. Without HOST:PORT it looks at the machine alone. The exit code is
    0 if nothing is wrong, and 1 otherwise."""
    named, config = addresses_and_run(words, config)
    if len(named) > 1:
        raise UsageError(f"{' '.join(named)}: the doctor asks one peer; name one HOST:PORT")
    flags.check_addresses(*named)
    check_memory()
    findings = [*_machine(flags), *_network(next(iter(named), None), config, said, flags)]
    if flags.as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        for finding in findings:
            click.echo(finding)
    return 0 if all(finding.ok for finding in findings) else ExitCode.FAILED


def _machine(flags: WorkerFlags) -> Iterator[Finding]:
    files = allow_open_files()
    yield Finding(
        "open files", files is None or files >= _FILES,
        "no limit" if files is None else f"at most {files}",
        f"allow {_FILES} with `ulimit -n {_FILES}`, or LimitNOFILE= in a systemd unit",
    )  # fmt: skip
    out = flags.out
    there = next(each for each in (out, *Path(os.path.realpath(out)).parents) if each.exists())
    free = shutil.disk_usage(there).free
    yield Finding(
        "disk", free >= _DISK_BYTES, f"{free / 1e9:.1f} GB free at {there}",
        "make room for checkpoints, or choose another --out",
    )  # fmt: skip
    if is_taken(out):
        yield Finding(
            "folder", False, f"--out {out}: another worker writes there",
            "choose another folder with --out",
        )  # fmt: skip
    if (memory := memory_bytes()) is not None:
        yield Finding(
            "memory", memory >= _MEMORY_BYTES, f"{memory / 1e9:.1f} GB available",
            "end something else, raise the limit, or take a smaller --model",
        )  # fmt: skip
    import torch

    from murmuration.worker.training.device import chosen_device

    try:
        device = chosen_device(flags.device)
    except MurmurError as error:
        yield Finding.refused("device", error)
    else:
        yield Finding("device", True, f"{device}, torch {torch.__version__}")


def _network(
    address: str | None, config: Path | None, said: RunFlags, flags: WorkerFlags
) -> Iterator[Finding]:
    from murmuration.worker.node.admission import check_free

    free = True
    try:
        check_free(flags.listen)
    except AddressInUse as error:
        yield Finding.refused("address", error)
        free = False  # the rest is looked at with another port
        flags = replace(flags, listen=addresses.join_address(split_address(flags.listen)[0], 0))
    first, identity, problem = None, None, None
    if address is not None:
        with flags.newcomer([address], _CALL_S, tell=lambda line: None) as newcomer:
            try:
                if (identity := flags.identity(newcomer, trial=True)) is not None:
                    yield Finding("token", True, "with it, or with --out, this machine is let in")
            except MurmurError as error:
                about = "the peer" if isinstance(error, PeersUnreachable) else "token"
                yield (problem := Finding.refused(about, error))
            if problem is None or problem.about != "the peer":
                try:
                    first = newcomer.ask_run(identity)
                    kind = "a coordinator" if first.coordinated else "a worker"
                    lock = "encrypted" if identity is not None else "not encrypted"
                    answer = Finding("the peer", True, f"{first.address} answers, {kind}, {lock}")
                except MurmurError as error:
                    about = "token" if isinstance(error, IdentityError) else "the peer"
                    answer = Finding.refused(about, error)
                if problem is None or answer.about != problem.about:
                    yield answer
    if first is not None and address is not None:
        yield from _run(first, address, config, said)
    where, finding = _own_address(address, flags, first)
    if free or not finding.ok:
        yield finding
    if first is not None and address is not None and not first.coordinated:
        dialled = where if free else None
        yield from asyncio.run(_both_ways(address, dialled, flags, first.manifest, identity))


def _run(first: "FirstAnswer", address: str, run: Path | None, said: RunFlags) -> Iterator[Finding]:
    from murmuration.worker.manifest import PROTOCOL
    from murmuration.worker.node.admission import check_version, clock_warning, join_config

    try:
        check_version(first)
    except MurmurError as error:
        yield Finding.refused("version", error)
    else:
        yield Finding("version", True, f"protocol {PROTOCOL} here and there")
    try:
        settings, typed = said.read()
        join_config(first.manifest.sections, run, settings, address, typed)
    except MurmurError as error:
        yield Finding.refused("the run", error)
    else:
        yield Finding("the run", True, f"{first.manifest.run:016x}")
    if warning := clock_warning(first):
        yield Finding.refused("clock", warning)
    elif first.ahead_s is not None:
        yield Finding("clock", True, f"{abs(first.ahead_s):.0f} s apart from theirs")


def _own_address(
    address: str | None, flags: WorkerFlags, first: "FirstAnswer | None"
) -> tuple[str | None, Finding]:
    from murmuration.worker.relay.router_port import NoRouterPort, UpnpRouter

    if flags.advertise == ROUTER:
        try:
            where = UpnpRouter().open(flags.listen, "")  # it ends in an hour without a worker
        except NoRouterPort as error:
            return None, Finding.refused("address", error)
        return public_address(where), Finding("address", True, f"{where}, which the router opens")
    seen_from = first.seen_from if first else ""
    try:
        found = flags.found([address] if address else [], seen_from)
    except MurmurError as error:
        return None, Finding.refused("address", error)
    advertised = found.advertise or flags.listen
    where = public_address(with_port(advertised, flags.listen))  # at which others dial back
    said = f"{where}, {found.advertise_origin}" if found.advertise_origin else where
    if addresses.is_loopback(split_address(where)[0]):
        said += ", which only this machine reaches"
    own = source_host(address) if address else None
    if seen_from and own and own != seen_from:
        said += f"; {address} sees {seen_from} where this machine has {own}: there is a NAT between"
    return where, Finding("address", True, said)


async def _both_ways(
    address: str, where: str | None, flags: WorkerFlags, run: "Manifest", identity: Identity | None
) -> list[Finding]:
    """Asks whether the peer reaches a server at `where`, and looks at the way to the peer."""
    from murmuration.worker.membership.first_contact import ask_to_dial
    from murmuration.worker.transport.grpc import GrpcTransport

    transport, findings = GrpcTransport(flags.listen, flags.proxy, identity), []
    try:
        if where is not None:
            name = _NAME if identity is None else identity.name
            bound = await transport.listen(_Answers(name, run.run))
            target = with_port(where, bound)
            me = Member(name, target, time.time_ns() // 1_000_000)
            undialled = await ask_to_dial(transport, address, me, run.pack())
            verb = "cannot dial" if undialled else "dials"
            reached = Finding("reached", not undialled, f"{address} {verb} {target}", _OPEN)
            if undialled is None:
                found, fix = f"{address} does not say", "try again, or ask another"
                reached = Finding("reached", False, found, fix)
            findings.append(reached)
        findings.append(await _link(transport, address))
    except TransportError as error:
        findings.append(Finding.refused("the way", error))
    finally:
        await transport.close()
    return findings


async def _link(transport: "GrpcTransport", address: str) -> Finding:
    """Round trip and rate, by calls that a peer answers and forgets. Raises TransportError."""

    async def call_s(payload: bytes) -> float:
        began = time.monotonic()
        request = pb.MeasureRequest(payload=payload).SerializeToString()
        await transport.call(address, Method.MEASURE, request, _CALL_S)
        return time.monotonic() - began

    try:
        async with asyncio.timeout(_RATE_S):
            await call_s(b"")  # it takes the connection as well
            trip_ms = 1000 * min([await call_s(b"") for _ in range(3)])
            began = time.monotonic()
            await asyncio.gather(*(call_s(bytes(_BULK_BYTES)) for _ in range(_BULK_CALLS)))
            mbps = 8e-6 * _BULK_CALLS * _BULK_BYTES / (time.monotonic() - began)
    except TimeoutError:
        return Finding("the way", True, f"slow: half a megabyte takes more than {_RATE_S:g} s")
    return Finding("the way", True, f"round trip {trip_ms:.1f} ms, {mbps:.1f} Mbit/s to there")


class _Answers:  # to a probe, as a peer of the run would
    def __init__(self, name: str, run: int) -> None:
        self._answer = pb.GossipMessage(sender=name, run=run).SerializeToString()

    def admit(self, method: str, caller: Caller) -> None:
        pass

    async def on_call(self, method: str, request: bytes, caller: Caller) -> bytes:
        return self._answer

    async def on_stream(self, method: str, stream: Stream, caller: Caller) -> None:
        """Nothing is served here."""
