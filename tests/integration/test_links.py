"""A slow link between real workers."""

import os

import pytest

from tests.support.workers import SMALL, report_of, swarm_ended

RATE_BYTES_S = 20e6 / 8


def test_a_swarm_behind_the_relay(tmp_path):
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
