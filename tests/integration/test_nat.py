"""A peer behind a real NAT: nobody can dial it, and it trains all the same."""

import re
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from murmuration.coordinator.asking import ask
from murmuration.worker.identity.authority import Authority
from murmuration.worker.identity.certificates import Identity, Role
from tests.support.gates import gate
from tests.support.namespaces import NamespaceHost, Namespaces, why_not
from tests.support.nat import HOST as NEIGHBOURS, behind_nat, upnp, why_no_nat
from tests.support.workers import SMALL, Event, Hashes, WorkerProcess, looked, settings_of

WHY_NOT = why_not() or why_no_nat()
needs_nat = pytest.mark.skipif(WHY_NOT is not None, reason=f"no NAT: {WHY_NOT}")


def started(
    up: ExitStack, run: Authority, out: Path, at: NamespaceHost, *words: str, port: int = 7700
) -> WorkerProcess:
    """A worker of an encrypted run, on that host."""
    run.new_identity(Role.PEER, out.name).save(out)
    where = ["--listen", f"0.0.0.0:{port}", "--out", str(out), "--json"]
    return up.enter_context(WorkerProcess([*words, *where], out.name, prefix=at.prefix))


@needs_nat
def test_a_peer_behind_nat_trains_through_relays_and_outlives_one(tmp_path):
    """Its neighbour, behind the same NAT, is dialled directly."""
    held, run = gate(tmp_path, 38), Authority.make(tmp_path / "a")
    settings = [*SMALL, *settings_of(run__steps=48, diloco__inner_steps=4)]
    with Namespaces(3, None) as network, ExitStack() as up:
        a, b, router = network.members
        inside = up.enter_context(behind_nat(router))
        workers: dict[str, WorkerProcess] = {}
        begins, joins = ["up", "--min-peers", "4", *settings], ["join", f"{a.address}:7700"]
        inner = ("nat", inside, joins, 7700), ("near", inside, joins, 7701)
        for name, host, words, port in (("a", a, begins, 7700), ("b", b, joins, 7700), *inner):
            words = [*words, *held.settings]
            workers[name] = started(up, run, tmp_path / name, host, *words, port=port)

        def relayed(*by: str) -> Event:
            return workers["nat"].wait_for(
                lambda e: e["event"] == "relayed" and sorted(e["by"]) == [*by], f"relays {by}"
            )

        assert relayed("a", "b")["address"].startswith("nat@")
        for worker in workers.values():
            worker.wait_for(lambda e: e["event"] == "round" and e["contributors"] == 4, "all four")
        found = [*inside.prefix, "ss", "-Htn", "state", "established", "dst", NEIGHBOURS]
        direct = subprocess.run(found, capture_output=True, text=True, check=True).stdout
        assert re.search(":770[01] ", direct), direct
        assert_seen_as_relayed(f"{a.address}:7700", tmp_path / "a")
        workers.pop("b").process.kill()
        relayed("a")
        with held.opened():
            codes = {name: worker.wait() for name, worker in workers.items()}
        assert codes == {"a": 0, "nat": 0, "near": 0}, {n: w.errors for n, w in workers.items()}
        assert len({Hashes.of(worker.result) for worker in workers.values()}) == 1
        assert workers["nat"].of("round")[-1]["contributors"] == 3
        (there,) = workers["nat"].of("listening")
        assert there["address"] == f"{router.address}:7700,{NEIGHBOURS}:7700"  # as others see it


@needs_nat
@pytest.mark.parametrize("first", ["nat", "a"])
def test_a_router_opens_a_port_for_a_peer_behind_it(tmp_path, first):
    """Asked to where the peer begins the run, by itself where others cannot dial it."""
    run = Authority.make(tmp_path / "a")
    settings = [*SMALL, *settings_of(run__steps=20, diloco__inner_steps=5)]
    with Namespaces(2, None) as network, ExitStack() as up:
        a, router = network.members
        hosts = {"a": a, "nat": up.enter_context(behind_nat(router))}
        public = up.enter_context(upnp(router, [a], tmp_path))
        mapped, begins = f"{public}:7700,{NEIGHBOURS}:7700", ["up", "--min-peers", "2", *settings]
        arguments = {
            "a": ["join", f"{public}:7700"],
            "nat": ["join", f"{a.address}:7700"],
            first: begins,
        }
        if first == "nat":
            begins += ["--advertise", "router"]
        workers = {}
        for name in sorted(hosts, key=lambda name: name != first):
            workers[name] = started(
                up, run, tmp_path / name, hosts[name], *arguments[name], "--no-relay"
            )
            workers[name].wait_for(lambda e: e["event"] == "listening", "a server")
        codes = {name: worker.wait() for name, worker in workers.items()}
        assert codes == {"a": 0, "nat": 0}, {n: w.errors for n, w in workers.items()}
        assert [event["address"] for event in workers["nat"].of("router_port")] == [mapped]
        rules = [*router.prefix, "nft", "list", "table", "inet", "upnp"]
        assert (
            "dnat" not in subprocess.run(rules, capture_output=True, text=True, check=True).stdout
        )


def assert_seen_as_relayed(address: str, run: Path) -> None:
    """By `murmur status`. Which relay comes first follows from round trips."""
    both, identity = ("relayed by a or b", "relayed by b or a"), Identity.load(run)
    members = looked(
        lambda: {each["peer"]: each for each in ask(address, identity=identity)["members"]},
        lambda members: members["nat"]["path"] in both,  # news is on its way
    )
    assert members["a"]["path"] == members["b"]["path"] == "direct"
    assert members["nat"]["rtt_ms"] > 0
