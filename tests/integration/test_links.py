"""Slow, far and broken links between real workers."""

import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from murmuration.algorithms.link import parse_link
from murmuration.coordinator.processes import RelayProcess
from tests.support.gates import gate
from tests.support.workers import (
    QUICK,
    SMALL,
    Hashes,
    free_addresses,
    report_of,
    running_swarm,
    settings_of,
    swarm_ended,
)

RATE_BYTES_S = 20e6 / 8


def test_a_swarm_behind_the_relay(tmp_path: Path) -> None:
    """`murmur swarm` with three small workers and twenty rounds, as a user runs it."""
    given = ("--workers", "3", "--steps", "40", "--inner-steps", "2", "--link", "20mbit")
    # Whoever has a proxy for the web has exceptions from it; they must not count here.
    env = {**os.environ, "no_proxy": "*", "NO_PROXY": "*"}
    done = swarm_ended(tmp_path, *given, *SMALL, env=env)
    assert done.returncode == 0, done.stderr
    assert "links: 20mbit each way" in done.stdout
    report = report_of(tmp_path)
    assert report["hashes_agree"]
    assert (report["step"], report["rounds_completed"], report["rounds_failed"]) == (40, 20, 0)
    assert report["link"] == "20mbit"
    for peer in report["peers"]:  # nothing went past it, or faster
        for moved in (peer["bytes_sent"], peer["bytes_received"]):
            assert moved / peer["wall_s"] <= 1.1 * RATE_BYTES_S
        over_link = report["link_bytes"][peer["peer"]]
        assert over_link["sent_bytes"] == pytest.approx(peer["bytes_sent"], rel=0.05)
        assert over_link["received_bytes"] == pytest.approx(peer["bytes_received"], rel=0.05)


def test_a_newcomer_joins_through_its_proxy(tmp_path: Path) -> None:
    settings = [*SMALL, *QUICK, *settings_of(run__steps=30, diloco__inner_steps=5)]
    held = gate(tmp_path, 13)
    (address,) = free_addresses(1)
    with ExitStack() as up, running_swarm(2, tmp_path, *settings, *held.settings) as swarm:
        hosts = {**swarm.addresses, "new": address}
        behind = {name: (at, parse_link("50mbit")) for name, at in hosts.items()}
        relay = up.enter_context(RelayProcess(behind, log_path=tmp_path / "relay.log"))
        for name in swarm.names:
            swarm.start(name, "--proxy", relay.proxies[name])
        swarm.workers["w0"].wait_for_round(1)
        where = ("--proxy", relay.proxies["new"], "--listen", address)
        newcomer = swarm.join("new", swarm.addresses["w1"], *where, *held.settings)
        newcomer.wait_for(lambda e: e["event"] == "adopted", "adoption")
        with held.opened():
            results = swarm.wait("w0", "w1", "new")
        assert relay.counters()["new"]["received_bytes"] >= results["new"]["bytes_received"]
    assert len({Hashes.of(result) for result in results.values()}) == 1
