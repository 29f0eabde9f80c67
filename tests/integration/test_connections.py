"""TLS connections that come, break off in the middle of the handshake and go end no server.

The server is a process of its own: gRPC's core used to end it by SIGABRT or SIGSEGV.
"""

import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
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


def connect(address: str, member: Identity, draws: random.Random) -> Iterator[str]:
    """Tells what becomes of each: half of the connections make a call with a member's certificate,
    a stranger breaks the others off."""
    for _ in range(EACH):
        if draws.random() < 0.5:
            try:
                with calling(address, member) as each:
                    each.call("Control/Status", pb.StatusRequest(), pb.StatusReply)
                yield "answered"
            except grpc.RpcError:
                yield "failed"
        else:
            with suppress(OSError):
                break_off(address, draws)
            yield "broken"


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


def test_a_server_outlives_connections_that_break_off_in_their_handshake(tmp_path):
    """While its certificate is renewed again and again, at moments that it does not choose."""
    authority = Authority.make(tmp_path / "authority")
    authority.new_identity(Role.PEER, "w0").save(tmp_path)
    member = authority.new_identity(Role.PEER, "w1")
    with WorkerProcess(
        [str(tmp_path)], "server", ("tests.integration.test_connections",)
    ) as server:
        listening = server.wait_for(lambda e: e["event"] == "listening", "address")
        with ThreadPoolExecutor(THREADS) as threads:
            draws = map(random.Random, range(THREADS))
            found = [
                threads.submit(Counter, connect(listening["address"], member, each))
                for each in draws
            ]
        counts = sum((each.result() for each in found), Counter[str]())
        code = server.process.poll()
    assert code is None, f"ended with {code}: {server.errors}"
    assert (counts["failed"], counts.total()) == (0, THREADS * EACH)
    assert min(counts["answered"], counts["broken"]) > THREADS * EACH / 3


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
