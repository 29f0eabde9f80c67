"""TLS connections that come, break off in the middle of the handshake and go end no server.

The server is a process of its own: gRPC's core used to end it by SIGABRT or SIGSEGV.
"""

import asyncio
import json
import random
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import grpc

from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker.identity.authority import Authority
from murmuration.worker.identity.certificates import Identity, Role
from murmuration.worker.transport import Caller, Handler, Stream
from murmuration.worker.transport.grpc import GrpcTransport
from tests.support.stranger import break_off, calling
from tests.support.workers import WorkerProcess

THREADS, EACH = 16, 120  # 1,920 connections; half of them make a call
_RENEWED_S = 1.0


@dataclass
class Counts:
    """Of one that connects: calls that were answered or not, and connections broken off."""

    answered: int = 0
    failed: int = 0
    broken: int = 0


class Server:
    """A server that renews its certificate all the time. Args: folder: for it and its authority."""

    def __init__(self, folder: Path) -> None:
        authority = Authority.make(folder / "authority")
        authority.new_identity(Role.PEER, "w0").save(folder)
        self.member = authority.new_identity(Role.PEER, "w1")
        program = ("tests.integration.test_connections",)
        self.worker = WorkerProcess([str(folder)], "server", program)
        self.process = self.worker.process
        listening = self.worker.wait_for(lambda e: e["event"] == "listening", "address")
        self.address = listening["address"]

    def connected(self, threads: int, goes_on: Callable[[Counts], bool]) -> Counts:
        """By several at once, each until it is enough or the server has ended: half of the
        connections make a call with a member's certificate, a stranger breaks the others off."""
        each = [Counts() for _ in range(threads)]

        def connect(counts: Counts, draws: random.Random) -> None:
            while goes_on(counts) and self.process.poll() is None:
                self._connect(counts, draws)

        running = [
            threading.Thread(target=connect, args=(counts, random.Random(number)))
            for number, counts in enumerate(each)
        ]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        return Counts(*(sum(getattr(c, kind) for c in each) for kind in vars(Counts())))

    def end(self) -> tuple[int | None, str]:
        """(its exit code, None if it lived until now; what it has written to stderr)."""
        code = self.process.poll()
        self.worker.end()
        return code, self.worker.errors

    def _connect(self, counts: Counts, draws: random.Random) -> None:
        if draws.random() < 0.5:
            try:
                with calling(self.address, self.member) as each:
                    each.call("Control/Status", pb.StatusRequest(), pb.StatusReply)
                counts.answered += 1
            except grpc.RpcError:
                counts.failed += 1
            return
        with suppress(OSError):
            break_off(self.address, draws)
        counts.broken += 1


class _Answers(Handler):
    async def on_call(self, method: str, request: bytes, caller: Caller) -> bytes:
        return b""

    async def on_stream(self, method: str, stream: Stream, caller: Caller) -> None:
        while await stream.receive() is not None:
            pass


async def serve(folder: Path) -> None:
    """The server's process: says its address, then serves until it is killed."""
    identity = Identity.load(folder)
    assert identity is not None
    server = GrpcTransport("127.0.0.1:0", security=identity)
    address = await server.listen(_Answers())
    print(json.dumps({"event": "listening", "address": address}), flush=True)
    renewed = time.monotonic()
    while True:
        await asyncio.sleep(0.001)
        sum(range(20_000))  # Python's lock is held at times, as where there is work
        if time.monotonic() - renewed > _RENEWED_S:
            server.renew(identity)
            renewed = time.monotonic()


def test_a_server_outlives_connections_that_break_off_in_their_handshake(tmp_path: Path) -> None:
    """While its certificate is renewed again and again, at moments that it does not choose."""
    server = Server(tmp_path)
    counts = server.connected(THREADS, lambda c: c.answered + c.failed + c.broken < EACH)
    code, said = server.end()
    assert code is None, f"ended with {code}: {said}"
    assert (counts.failed, counts.answered + counts.broken) == (0, THREADS * EACH)
    assert min(counts.answered, counts.broken) > THREADS * EACH / 3


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
