"""Five hosts of which three cannot be dialled: gaps between rounds, loss, bytes, a relay's end.

    python -m tests.lab nat [--rounds 60] [--inner-steps 20]

Each host is a network namespace. Two are behind NATs of their own (nftables: masquerade, nothing
comes in), one listens on all addresses of its machine, and one advertises an address that nobody
has. Two healthy hosts train; the others join them one by one. The same is done with five hosts that
all can be dialled, twice, which says what the loss differs by anyway. In a last run one of the two
relays is killed. A step takes a pause of 50 ms, so that the hosts do not share the cores' time.

The exit code is 1 if a gap between two rounds of a healthy host is longer than two rounds, if a
peer is left out or ends with another model, or if the loss is further from the undisturbed runs'
than they are from each other, and 1 %.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from murmuration.coordinator import Failure
from murmuration.coordinator.links.namespaces import NamespaceHost, Namespaces
from murmuration.coordinator.report.status import ask
from murmuration.worker.identity import Authority, Role
from tests.lab.polling import seconds_until
from tests.support.nat import behind_nat
from tests.support.workers import settings_of

_PORT = 7700
# Code is loaded by nobody on a peer's word: each names it.
_TASK = settings_of(task__name="tests.support.slow_task:SlowBytes", task__pause_s=0.05)
_PATIENCE_S = 600.0
_MOST_GAP = 2.0  # of a round
_MOST_LOSS = 0.01
_NAMES = ("healthy", "wildcard", "nat-1", "nat-2", "wrong")


class Peer:
    """A `murmur` on one host; its events are read as they come, each with its time."""

    def __init__(self, name: str, host: NamespaceHost, arguments: Sequence[str]) -> None:
        command = [*host.prefix, sys.executable, "-m", "murmuration.worker.cli", *arguments]
        self.name = name
        self.process = subprocess.Popen(
            [*command, "--threads", "1", "--json"], stdout=subprocess.PIPE, text=True
        )
        self.events: list[tuple[float, dict[str, Any]]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def of(self, kind: str) -> list[tuple[float, dict[str, Any]]]:
        return [(at_s, event) for at_s, event in self.events if event["event"] == kind]

    @property
    def contributors(self) -> list[int]:
        """Of each round."""
        return [event["contributors"] for _, event in self.of("round")]

    @property
    def relays(self) -> list[str]:
        """As it has said it last."""
        said = self.of("relayed")
        return said[-1][1]["by"] if said else []

    @property
    def gaps_s(self) -> list[float]:
        """Between its rounds."""
        times = [at_s for at_s, _ in self.of("round")]
        return [later - earlier for earlier, later in pairwise(times)]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with suppress(json.JSONDecodeError):  # killed while it was writing
                self.events.append((time.monotonic(), json.loads(line)))


@dataclass(frozen=True)
class Outcome:
    """Args:
    longest_gap: between two rounds of a host that all can dial, in rounds.
    loss: of the model that they end with; anchors: of all that have come to the end.
    relayed_bytes: by the host that has carried them.
    """

    longest_gap: float
    round_s: float
    loss: float
    anchors: set[str]
    whole_rounds: int
    relays: dict[str, list[str]]
    relayed_bytes: dict[str, int]


@contextmanager
def five_hosts(*, nat: bool, settings: Sequence[str]) -> Iterator[tuple[list[Peer], list[str]]]:
    """(the peers, all in rounds; addresses of the first two)."""
    with tempfile.TemporaryDirectory() as folder, Namespaces(5, None) as network, ExitStack() as on:
        hosts = list(network.members)
        if nat:
            for index in (2, 3):
                hosts[index] = on.enter_context(behind_nat(network.members[index]))
        run = Authority.make(Path(folder) / _NAMES[0])
        addresses = [f"{host.address}:{_PORT}" for host in hosts[:2]]
        peers: list[Peer] = []
        for index, (name, host) in enumerate(zip(_NAMES, hosts, strict=True)):
            out = Path(folder) / name
            run.new_identity(Role.PEER, name).save(out)
            listen = f"{host.address}:{_PORT}" if index == 0 or not nat else f"0.0.0.0:{_PORT}"
            wrong = ["--advertise", f"{network.host_address}:{_PORT}"]
            arguments = ["up", *settings] if index == 0 else ["join", addresses[0]]
            arguments += _TASK
            more = wrong if nat and index == 4 else []
            peer = Peer(name, host, [*arguments, "--listen", listen, "--out", str(out), *more])
            on.callback(peer.end)
            peers.append(peer)
            until(lambda: peers[0].contributors[-1:] == [len(peers)], f"{name} in a round", peers)
        yield peers, addresses


def until(what: Callable[[], bool], name: str, peers: Sequence[Peer]) -> float:
    """Seconds that it took. Raises RuntimeError: a peer has ended, or it takes too long."""

    def reached() -> bool:
        if what():
            return True
        if ended := [peer.name for peer in peers if peer.process.poll() not in (None, 0, -9)]:
            raise RuntimeError(f"{name}: ended before: {ended}")
        return False

    took_s = seconds_until(reached, _PATIENCE_S, every_s=0.02)
    if took_s is None:
        raise RuntimeError(f"{name}: not in {_PATIENCE_S:g} s")
    return took_s


def whole_run(*, nat: bool, settings: Sequence[str]) -> Outcome:
    """To the end of the schedule."""
    with five_hosts(nat=nat, settings=settings) as (peers, addresses):
        carried: dict[str, int] = {}
        while any(peer.process.poll() is None for peer in peers):
            for peer, address in zip(peers, addresses, strict=False):
                with suppress(Failure):
                    identity = _identity(peer)
                    told = ask(address, 2.0, identity)["relayed"]["relayed_bytes"]
                    carried[peer.name] = sum(told.values())
            time.sleep(0.5)  # between two looks at what relays have carried by now
        if failed := {peer.name: code for peer in peers if (code := peer.process.wait())}:
            raise RuntimeError(f"exit codes {failed}")
        until(lambda: all(peer.of("result") for peer in peers), "results", peers)
        results = [peer.of("result")[-1][1] for peer in peers]
        gaps_s = [gap for peer in peers[:2] for gap in peer.gaps_s]
        round_s = statistics.median(gaps_s)
        return Outcome(
            longest_gap=max(gaps_s) / round_s,
            round_s=round_s,
            loss=results[0]["val_loss"],
            anchors={result["anchor_hash"] for result in results},
            whole_rounds=peers[0].contributors.count(5),
            relays={
                peer.name: sorted({name for _, event in said for name in event["by"]})
                for peer in peers
                if (said := peer.of("relayed"))
            },
            relayed_bytes=carried,
        )


def relay_killed(settings: Sequence[str]) -> tuple[float, float]:
    """(seconds until a relayed peer has said that it is reached through others, and until the next
    round of all that are left)."""
    with five_hosts(nat=True, settings=settings) as (peers, _):
        healthy, relay, *relayed = peers
        until(lambda: all(relay.name in peer.relays for peer in relayed), "two relays", peers)
        relay.process.kill()
        said_s = until(lambda: all(relay.name not in p.relays for p in relayed), "others", peers)
        rounds = len(relayed[0].contributors)
        went_on_s = until(lambda: 4 in relayed[0].contributors[rounds:], "a round of four", peers)
        assert healthy.process.poll() is None
        return said_s, said_s + went_on_s


def _identity(peer: Peer) -> Any:
    from murmuration.worker.identity import Identity

    arguments = list(peer.process.args)  # type: ignore[arg-type]  # a list of ours
    return Identity.load(Path(arguments[arguments.index("--out") + 1]))


def main() -> int:
    """Prints a Markdown table and a verdict."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--inner-steps", type=int, default=20)
    args = parser.parse_args()
    steps = args.rounds * args.inner_steps
    settings = settings_of(run__steps=steps, diloco__inner_steps=args.inner_steps)
    plain = [whole_run(nat=False, settings=settings) for _ in range(2)]
    nat = whole_run(nat=True, settings=settings)
    print(
        "| hosts | a round | longest gap of the healthy | rounds of all five | loss | relayed |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: |"
    )
    for name, each in (("all can be dialled", plain[0]), ("again", plain[1]), ("as above", nat)):
        relayed_mb = sum(each.relayed_bytes.values()) / 1e6
        print(
            f"| {name} | {each.round_s:.2f} s | {each.longest_gap:.1f} rounds "
            f"| {each.whole_rounds} | {each.loss:.3f} | {relayed_mb:.1f} MB |"
        )
    for name, relays in nat.relays.items():
        print(f"{name} was reached through {' and '.join(relays)}")
    print(f"relayed: {nat.relayed_bytes}")
    endless = settings_of(run__steps=10**7, diloco__inner_steps=args.inner_steps)
    said_s, went_on_s = relay_killed(endless)
    print(
        f"the relay killed: another is advertised after {said_s:.1f} s, rounds go on after "
        f"{went_on_s:.1f} s"
    )
    return verdict(plain, nat)


def verdict(plain: Sequence[Outcome], nat: Outcome) -> int:
    """Prints what is not as asked; the exit code."""
    noise = abs(plain[0].loss - plain[1].loss) / plain[0].loss
    apart = min(abs(nat.loss - each.loss) / each.loss for each in plain)
    problems = [
        *([f"a gap of {nat.longest_gap:.1f} rounds"] if nat.longest_gap > _MOST_GAP else []),
        *([f"{len(nat.anchors)} models"] if len(nat.anchors) != 1 else []),
        *(["not all were relayed"] if set(nat.relays) != set(_NAMES[2:]) else []),
        *([f"the loss is {apart:.1%} apart"] if apart > max(noise, _MOST_LOSS) else []),
        *(["nothing was relayed"] if not sum(nat.relayed_bytes.values()) else []),
    ]
    print(
        f"verdict: {'; '.join(problems) or 'as asked'} (loss {apart:.2%} apart, noise {noise:.2%})"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
