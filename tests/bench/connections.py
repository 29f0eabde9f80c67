"""TLS connections that come, ask or are broken off, and go: does the server that they reach live?

    python tests/bench/connections.py [--runs 20] [--seconds 10] [--threads 16]
    python tests/bench/connections.py --each-handshake      # as it was: one at each handshake
    python tests/bench/connections.py --renew-s 2             # the certificate is renewed often
    python tests/bench/connections.py --renew-s 0.001 --at-once     # ... amid handshakes

One server with the real transport, in a process of its own, which also computes; each run has a
new one. Half of the connections make a call with a member's certificate. The others are a
stranger's, which breaks off: at once, by a reset, or in the middle of its first record of TLS.
Prints how many connections each run had, and how its server ended; fails if one did.
"""

import argparse
import asyncio
import random
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import grpc

from protos import murmuration_pb2 as pb
from protos.identity import Authority, Identity, Role
from tests.support.stranger import calling
from worker.transport import Caller, Stream
from worker.transport import grpc as transport

Wanted = Callable[[], "grpc.ServerCertificateConfiguration | None"]


class Answers:
    async def on_call(self, method: str, request: bytes, caller: Caller) -> bytes:
        return b""

    async def on_stream(self, method: str, stream: Stream, caller: Caller) -> None:
        while await stream.receive() is not None:
            pass


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each run")
    parser.add_argument("--threads", type=int, default=16, help="that connect")
    parser.add_argument("--renew-s", type=float, default=0.0, help="renew so often; 0: never")
    parser.add_argument("--at-once", action="store_true", help="renew amid handshakes")
    parser.add_argument("--each-handshake", action="store_true", help="a certificate at each")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        asyncio.run(serve(options))
        return 0
    ended = 0
    with tempfile.TemporaryDirectory() as folder:
        authority = Authority.make(Path(folder) / "authority")
        authority.new_identity(Role.PEER, "w0").save(Path(folder))
        caller = authority.new_identity(Role.PEER, "w1")
        for number in range(1, options.runs + 1):
            answered, broken, how = attacked(Path(folder), caller, options)
            ended += how != "alive"
            print(f"run {number}: {answered} answered, {broken} broken off, {how}", flush=True)
    print(f"{ended} of {options.runs} servers ended")
    return 1 if ended else 0


def attacked(folder: Path, caller: Identity, options: argparse.Namespace) -> tuple[int, int, str]:
    """Connections that were answered and broken off, and what became of the server."""
    command = [sys.executable, __file__, "--serve", str(folder), "--renew-s", str(options.renew_s)]
    command += ["--at-once"] * options.at_once + ["--each-handshake"] * options.each_handshake
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as s:
        assert s.stdout is not None
        assert s.stderr is not None
        address = s.stdout.readline().strip()
        counts = [[0, 0] for _ in range(options.threads)]
        until = time.monotonic() + options.seconds
        threads = [
            threading.Thread(target=connect, args=(address, caller, until, s, count))
            for count in counts
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        code = s.poll()
        s.kill()
        said = [line for line in s.stderr.read().splitlines() if "Check failed" in line]
    how = "alive" if code is None else f"ended by {signal.Signals(-code).name}" if code < 0 else ""
    answered, broken = (sum(count[kind] for count in counts) for kind in (0, 1))
    return answered, broken, " ".join([how or f"ended with {code}", *said[:1]])


def connect(
    address: str,
    caller: Identity,
    until: float,
    server: "subprocess.Popen[str]",
    counts: list[int],
) -> None:
    """One connection after another, until it is time or the server has ended."""
    host, port = address.split(":")
    while time.monotonic() < until and server.poll() is None:
        if random.random() < 0.5:
            with suppress(grpc.RpcError), calling(address, caller) as each:
                each.call("Control/Status", pb.StatusRequest(), pb.StatusReply)
                counts[0] += 1
            continue
        with suppress(OSError), socket.create_connection((host, int(port))) as connection:
            how = random.random()
            if how < 0.3:
                connection.send(b"\x16\x03\x01\x02\x00" + bytes(random.randrange(400)))
            elif how < 0.5:
                linger = struct.pack("ii", 1, 0)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            counts[1] += 1


async def serve(options: argparse.Namespace) -> None:
    """The server's process: says its address, then serves until it is killed."""
    identity = Identity.load(options.serve)
    assert identity is not None
    if options.at_once:
        transport._HANDSHAKES_BEGIN_S = 0.0
    serving = transport.GrpcTransport("127.0.0.1:0", security=identity)
    if options.each_handshake:
        given = transport._server_configuration(identity)
        # A configuration at each handshake, which is what servers did before.
        serving._renewed_configuration = lambda: given  # type: ignore[method-assign]
    print(await serving.listen(Answers()), flush=True)
    renewed = time.monotonic()
    while True:
        await asyncio.sleep(0.001)
        sum(range(20_000))  # Python's lock is held at times, as where there is work
        if options.renew_s and time.monotonic() - renewed > options.renew_s:
            serving.renew(identity)
            renewed = time.monotonic()


if __name__ == "__main__":
    raise SystemExit(main())
