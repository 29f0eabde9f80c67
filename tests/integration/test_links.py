"""Slow, far and broken links between real workers."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.fork_server import MURMUR, run
from tests.support.gate import gate
from tests.support.shaped import relayed_swarm
from tests.support.workers import PATIENCE_S, QUICK, SMALL, Hashes, free_addresses, settings_of

RATE_BYTES_S = 20e6 / 8


def swarm_report(out: Path, *args: str) -> dict[str, Any]:
    """Runs `murmur swarm` with three small workers and 20 rounds, as a user would."""
    command = [
        *(*MURMUR, "swarm", "--workers", "3", "--steps", "40"),
        *("--inner-steps", "2", "--out", str(out), *args, *SMALL),
    ]
    # Whoever has a proxy for the web has exceptions from it; they must not count here.
    env = {**os.environ, "no_proxy": "*", "NO_PROXY": "*"}
    done = run(command, env=env, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert "links: 20mbit each way" in done.stdout
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    assert report["hashes_agree"]
    assert (report["step"], report["rounds_completed"], report["rounds_failed"]) == (40, 20, 0)
    assert report["link"] == "20mbit"
    return report


def assert_no_faster_than_the_link(report: dict[str, Any]) -> None:
    for peer in report["peers"]:
        for moved in (peer["bytes_sent"], peer["bytes_received"]):
            assert moved / peer["wall_s"] <= 1.1 * RATE_BYTES_S


def test_a_swarm_behind_the_relay(tmp_path: Path) -> None:
    report = swarm_report(tmp_path / "out", "--link", "20mbit")
    assert_no_faster_than_the_link(report)
    for peer in report["peers"]:  # nothing went past it
        over_link = report["link_bytes"][peer["peer"]]
        assert over_link["sent_bytes"] == pytest.approx(peer["bytes_sent"], rel=0.05)
        assert over_link["received_bytes"] == pytest.approx(peer["bytes_received"], rel=0.05)


def test_a_newcomer_joins_through_its_proxy(tmp_path: Path) -> None:
    settings = [*SMALL, *QUICK, *settings_of(run__steps=200, diloco__inner_steps=10)]
    held = gate(tmp_path, 25)
    (address,) = free_addresses(1)
    with relayed_swarm(2, tmp_path, "50mbit", [*settings, *held.settings], {"new": address}) as (
        swarm,
        relay,
    ):
        swarm.workers["w0"].wait_for_round(1)
        where = ("--proxy", relay.proxies["new"], "--listen", address)
        newcomer = swarm.join("new", swarm.addresses["w1"], *where, *held.settings)
        newcomer.wait_for(lambda e: e["event"] == "adopted", "adoption")
        with held.opened():
            results = swarm.wait("w0", "w1", "new")
        assert relay.counters()["new"]["received_bytes"] >= results["new"]["bytes_received"]
    assert len({Hashes.of(result) for result in results.values()}) == 1
