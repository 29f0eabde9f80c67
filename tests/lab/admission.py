"""Five hosts let each other in by token, and nobody else: what each stranger is told, and how soon.

    python -m tests.lab admission

Each host is a network namespace with an address of its own. The commands are those that people
type. A sixth host tries everything that is no valid token. Prints a Markdown table: the line that
it is told, its exit code and the seconds, the start of Python included. Fails where one of them
gets in, or the five have not trained on together meanwhile.
"""

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from murmuration.coordinator.links.namespaces import NamespaceHost, Namespaces
from murmuration.protos.identity import Authority
from tests.lab.polling import seconds_until
from tests.support.workers import SMALL, settings_of

_MURMUR = (sys.executable, "-m", "murmuration.worker.cli")
_AT_LEISURE = ("nice", "-n", "19")  # six peers that train as fast as they can share the cores
_PORT = 7700
_PATIENCE_S = 120.0
_RUN = [*SMALL, *settings_of(run__steps=1_000_000, diloco__inner_steps=20)]
# Somebody has seen a join go by, and sends the same once more: the key is not in it.
_REPLAY = """
import os, sys
os.environ["GRPC_VERBOSITY"] = "NONE"
from dataclasses import replace
import grpc
from murmuration.protos import murmuration_pb2 as pb
from murmuration.protos.identity import Token
from murmuration.protos.identity.certificates import new_key, request_for
from tests.support.stranger import Stranger
token, address = Token.parse(sys.argv[1]), sys.argv[2]
stranger = Stranger(address, token.identity)
request = pb.EnrolRequest(request=request_for(new_key()), name="replayed")
stranger.call("Control/Enrol", request, pb.EnrolReply)
again = stranger.call("Control/Enrol", request, pb.EnrolReply)
his = replace(token.identity, certificate=again.certificate)
try:
    Stranger(address, his).call("Control/Status", pb.StatusRequest(), pb.StatusReply)
except grpc.RpcError as error:
    sys.exit("gets the certificate of the first one's key, and has not got that key")
sys.exit(0)
"""


class Peer:
    """A `murmur` that goes on, on one host; its events are read as they come."""

    def __init__(self, host: NamespaceHost, arguments: Sequence[str]) -> None:
        command = [*host.prefix, *_AT_LEISURE, *_MURMUR, *arguments, "--json"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.rounds: list[int] = []  # contributors of each
        threading.Thread(target=self._read, daemon=True).start()

    def wait_for_rounds(self, contributors: int, count: int = 1) -> None:
        """Until so many rounds of so many peers have ended since now. Raises TimeoutError."""
        before = len(self.rounds)

        def ended() -> bool:
            return self.rounds[before:].count(contributors) >= count

        if seconds_until(ended, _PATIENCE_S, every_s=0.05) is None:
            raise TimeoutError(f"{count} rounds of {contributors} peers")

    def end(self) -> None:
        self.process.terminate()
        self.process.wait()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event = json.loads(line)
            if event["event"] == "round":
                self.rounds.append(event["contributors"])


def main() -> None:
    """Prints the table; raises where somebody got in that must not."""
    with tempfile.TemporaryDirectory() as folder, Namespaces(6, None) as network, ExitStack() as on:
        *hosts, outside = network.members
        out = Path(folder)
        run = Authority.make(out / "h0")
        address = f"{hosts[0].address}:{_PORT}"
        peers = []
        token = murmur(hosts[0], "token", "create", "--uses", "4", str(out / "h0"))
        for number, host in enumerate(hosts):
            listens = ["--listen", f"{host.address}:{_PORT}", "--out", str(out / f"h{number}")]
            where = ["join", address, "--token", token] if number else ["up", *_RUN]
            peer = Peer(host, [*where, *listens])
            on.callback(peer.end)
            peers.append(peer)
            if number == 0:
                peer.wait_for_rounds(1)
        peers[0].wait_for_rounds(5, 3)
        his = Authority.make(out / "his")
        there = f"{outside.address}:{_PORT}"
        middle = Peer(outside, ["up", *_RUN, "--listen", there, "--out", str(out / "his")])
        on.callback(middle.end)
        middle.wait_for_rounds(1)
        used = str(run.create_token())
        revoked = run.create_token()
        murmur(hosts[0], "token", "revoke", str(out / "h0"), revoked.id)
        join = [*_MURMUR, "join", address, "--out", str(out / "x"), "--token"]
        replay = [sys.executable, "-c", _REPLAY]
        tries: list[tuple[str, list[str]]] = [
            ("without a token", join[:-1]),
            ("an expired token", [*join, str(run.create_token(valid_s=-1))]),
            ("the same join once more", [*replay, used, address]),
            ("a used token", [*join, used]),
            ("a revoked token", [*join, str(revoked)]),
            ("a token of another authority", [*join, str(his.create_token())]),
            ("to a man in the middle", [*join, str(run.create_token())]),
        ]
        tries[-1][1][tries[-1][1].index(address)] = there
        print("| who comes | seconds | exit code | what it is told |\n| --- | ---: | ---: | --- |")
        for name, command in tries:
            began = time.monotonic()
            ended = subprocess.run([*outside.prefix, *command], capture_output=True, text=True)
            seconds = time.monotonic() - began
            said = (ended.stderr or ended.stdout).strip().splitlines()[-1]
            assert ended.returncode != 0, f"{name} got in"
            assert said, f"{name} is told nothing"
            print(f"| {name} | {seconds:.1f} | {ended.returncode} | {said} |", flush=True)
        peers[0].wait_for_rounds(5, 3)
        assert not (out / "x").exists()
        rounds = [len(peer.rounds) for peer in peers]
        print(f"\nrounds of the five meanwhile: {rounds}, the last of {peers[0].rounds[-1]} peers")


def murmur(host: NamespaceHost, *arguments: str) -> str:
    """What a command prints that ends by itself. Raises CalledProcessError."""
    command = [*host.prefix, *_MURMUR, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[0]


if __name__ == "__main__":
    main()
