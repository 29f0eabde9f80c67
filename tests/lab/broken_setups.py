"""Fifteen set-ups that cannot work: what `murmur join` and `murmur doctor` say, and how soon.

    python -m tests.lab broken-setups [--only NAME ...]

Two hosts in network namespaces (root, `nft`, `faketime`). On the first a worker has begun a run. On
the second somebody types `murmur join` and `murmur doctor`, each time with something else that is
broken. Prints a Markdown table: the line that names it, the exit code and the seconds, the start of
Python included. Ends with 1 if a line does not name the cause, or comes after ten seconds.
"""

import argparse
import os
import re
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from murmuration.coordinator.links.namespaces import NamespaceHost, Namespaces, NoNamespaces
from murmuration.protos.identity import Authority
from tests.lab.polling import seconds_until
from tests.support.workers import SMALL, settings_of

_MURMUR = [sys.executable, "-m", "murmuration.worker.cli"]
_OTHER_VERSION = (
    "import murmuration.worker.manifest as m; m.PROTOCOL += 1; import sys; sys.argv[0] = 'murmur'; "
    "from murmuration.worker.cli import main; main()"
)
_PORT = 7700
_WITHIN_S, _PATIENCE_S = 10.0, 60.0
_RUN = [*SMALL, *settings_of(run__steps=10_000_000, diloco__inner_steps=200)]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Args:
    name: what is broken.
    says: a pattern of the line that names it, in what join prints; doctor: in what doctor does.
    codes: that join may end with; empty: it goes on, and has said so.
    address: in place of the first worker's.
    words: further arguments.
    before: put before the command, in the namespace.
    program: in place of `murmur`.
    broken: what is done meanwhile.
    token: whether join gets one; by default it does.
    """

    name: str
    says: str
    doctor: str
    codes: tuple[int, ...] = ()
    address: str | None = None
    words: Sequence[str] = ()
    before: Sequence[str] = ()
    program: Sequence[str] = field(default_factory=lambda: _MURMUR)
    broken: Callable[[], AbstractContextManager[object]] | None = None
    token: str | None = None
    out: Path | None = None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    wanted = parser.parse_args().only
    for program, package in (("nft", "nftables"), ("faketime", "faketime")):
        if shutil.which(program) is None:
            raise SystemExit(f"broken: no `{program}` here (on Debian: apt-get install {package})")
    try:
        with tempfile.TemporaryDirectory() as folder, Namespaces(2, None) as network:
            return measure(network.members[0], network.members[1], Path(folder), wanted)
    except NoNamespaces as reason:
        raise SystemExit(f"broken: {reason}") from reason


def measure(first: NamespaceHost, second: NamespaceHost, folder: Path, wanted: list[str]) -> int:
    authority = Authority.make(folder / "first")
    address = f"{first.address}:{_PORT}"
    worker = subprocess.Popen(
        [*first.prefix, "nice", *_MURMUR, "up", "--name", "first", "--listen", address,
         "--out", str(folder / "first"), "--threads", "1", *_RUN],
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    bad = 0
    try:
        wait_until_listens(first.address)
        print(
            "| what is broken | `murmur join` | code, seconds | `murmur doctor` | code, seconds |"
        )
        print("| --- | --- | ---: | --- | ---: |")
        for number, setup in enumerate(setups(first, second, folder, authority)):
            if wanted and setup.name not in wanted:
                continue
            bad += not tried(setup, second, address, folder / f"out{number}", authority)
        if worker.poll() is not None:
            raise SystemExit(f"the first worker has ended with {worker.returncode}")
    finally:
        worker.terminate()
        worker.wait()
    print(f"\n{bad} not as wanted" if bad else "\nall are named, with the way out, within 10 s")
    return 1 if bad else 0


def wait_until_listens(host: str) -> None:
    """Raises TimeoutError."""

    def listens() -> bool:
        with suppress(OSError), socket.create_connection((host, _PORT), timeout=1):
            return True
        return False

    if seconds_until(listens, _PATIENCE_S) is None:
        raise TimeoutError(f"nothing listens on {host}:{_PORT}")


def tried(setup: Setup, host: NamespaceHost, address: str, out: Path, authority: Authority) -> bool:
    """Whether both commands name what is broken in time. Prints a line of the table."""
    there, out = setup.address or address, setup.out or out
    token = setup.token or str(authority.create_token(uses=2))
    where = [
        "--listen",
        f"{host.address}:{_PORT}",
        "--out",
        str(out),
        "--threads",
        "1",
        *setup.words,
    ]
    cells, good = [], True
    with ExitStack() as meanwhile:
        if setup.broken is not None:
            meanwhile.enter_context(setup.broken())
        for command, says, codes in (
            ("join", setup.says, setup.codes),
            ("doctor", setup.doctor, (1,)),
        ):
            line = [*host.prefix, *setup.before, *setup.program, command, there, *where]
            line += ["--wait-s", "3"] if command == "join" else []
            told, code, seconds = run(line, says, {"MURMUR_TOKEN": token}, goes_on=not codes)
            fine = bool(re.search(says, told)) and seconds <= _WITHIN_S
            fine &= code is None if not codes else code in codes
            good &= fine
            shown = told.replace("|", "\\|").replace(str(out), "OUT")
            cells += [shown, f"{'goes on' if code is None else code}, {seconds:.1f} s"]
            cells[-1] += "" if fine else " **not as wanted**"
    print(f"| {setup.name} | {' | '.join(cells)} |", flush=True)
    return good


def run(
    line: Sequence[str], says: str, environment: dict[str, str], *, goes_on: bool
) -> tuple[str, int | None, float]:
    """(the line that fits, or else the last one; the exit code, None where it went on; seconds
    until the line where it goes on, until the end otherwise)."""
    began = time.monotonic()
    with subprocess.Popen(
        line,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | environment,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        text, found = "", ""
        with selectors.DefaultSelector() as ready:
            ready.register(process.stdout, selectors.EVENT_READ)
            while time.monotonic() - began < _PATIENCE_S:
                ready.select(0.1)
                if (piece := process.stdout.read()) is None:
                    continue
                text += piece.decode(errors="replace")
                lines = [each for each in text.split("\n") if each.strip()]
                found = next((each for each in lines if re.search(says, each)), "")
                if not piece or (found and goes_on):
                    break
        seconds = time.monotonic() - began
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)  # faketime has a child
        code = process.wait()
        if found and goes_on:
            code = None
    return found or (lines[-1] if lines else "nothing"), code, seconds


def setups(
    first: NamespaceHost, second: NamespaceHost, folder: Path, authority: Authority
) -> Iterator[Setup]:
    """The fifteen."""
    nowhere = f"{first.address.rpartition('.')[0]}.250:{_PORT}"
    other = str(Authority.make(folder / "other").create_token())

    def limited(what: str) -> list[str]:
        return ["sh", "-c", f'ulimit {what}; exec "$@"', "sh"]

    reached = "BAD  the peer: .*"
    yield Setup(name="host", address=nowhere, codes=(6,), says=f"{nowhere}.*check the address",
                doctor=f"{reached}{nowhere}.*check the address")  # fmt: skip
    wrong = f"{first.address}:7999"
    yield Setup(name="port", address=wrong, codes=(6,), says=f"{wrong}.*refused.*check the address",
                doctor=f"{reached}{wrong}.*refused")  # fmt: skip
    name = f"no.such.host.invalid:{_PORT}"
    yield Setup(name="DNS name", address=name, codes=(6,), says="no.such.host.invalid.*name",
                doctor=f"{reached}no.such.host.invalid.*name")  # fmt: skip
    for verdict in ("drop", "reject"):
        yield Setup(name=f"firewall: {verdict}", codes=(6,), says="port is open",
                    doctor=f"{reached}port is open",
                    broken=lambda verdict=verdict: firewall(first, second, verdict))  # fmt: skip
    yield Setup(name="version", program=[sys.executable, "-c", _OTHER_VERSION], codes=(5,),
                says="install the version", doctor="BAD  version: ")  # fmt: skip
    yield Setup(name="manifest", words=["--inner-steps", "33"], codes=(5,),
                says="diloco.inner_steps: 33 here, 200 there",
                doctor="BAD  the run: .*inner_steps: 33 here")  # fmt: skip
    yield Setup(name="token", token=other, codes=(10,), says="authority",
                doctor="BAD  token: .*authority")  # fmt: skip
    for way in ("-1h", "+1h"):
        early = ["env", "DONT_FAKE_MONOTONIC=1", "faketime", "-f", way]
        yield Setup(
            name=f"clock {way}", before=early, says="clock here is 3600 s", doctor="BAD  clock: "
        )
    yield Setup(name="disk", out=folder / "small" / "worker", codes=(3,), says="No space left",
                doctor="BAD  disk: ", broken=lambda: small_disk(folder / "small"))  # fmt: skip
    yield Setup(name="memory", before=limited("-v 600000"), codes=(1,), says="not enough memory",
                doctor="not enough memory")  # fmt: skip
    yield Setup(
        name="port taken",
        codes=(7,),
        says="cannot listen on",
        doctor="BAD  address: .*cannot listen on",
        broken=lambda: listener(second),
    )
    yield Setup(name="name taken", words=["--name", "first"], codes=(10,), says="first.*--name",
                doctor="BAD  token: .*first.*--name")  # fmt: skip
    yield Setup(name="folder taken", out=folder / "first", codes=(3,), says="another worker writes",
                doctor="BAD  folder: .*another worker writes")  # fmt: skip
    yield Setup(name="file limit", before=limited("-n 48"), says="open files: at most 48",
                doctor="BAD  open files: ")  # fmt: skip


@contextmanager
def firewall(host: NamespaceHost, other: NamespaceHost, verdict: str) -> Iterator[None]:
    """Of `host`, against `other`."""
    nft(host, "add table ip broken")
    nft(host, "add chain ip broken in { type filter hook input priority 0 ; }")
    nft(host, f"add rule ip broken in ip saddr {other.address} tcp dport {_PORT} {verdict}")
    try:
        yield
    finally:
        nft(host, "delete table ip broken")


def nft(host: NamespaceHost, rule: str) -> None:
    subprocess.run([*host.prefix, "nft", rule], check=True)


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A file system of 32 KiB."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@contextmanager
def listener(host: NamespaceHost) -> Iterator[None]:
    """Something else that serves at the worker's port."""
    serves = f"socket.create_server(('{host.address}', {_PORT}))"
    code = f"import socket; s = {serves}; print(flush=True); s.accept()"
    command = [*host.prefix, sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield
        finally:
            process.kill()


if __name__ == "__main__":
    raise SystemExit(main())
