"""A peer in short, and all of them in figures and in a table."""

from typing import Any

import pytest

from murmuration.worker.views.summary import PeerSummary, SwarmSummary, summary_of

OWN: dict[str, Any] = {
    "peer": "w0", "phase": "training", "step": 100, "steps": 400, "loss": 2.5, "steps_per_s": 10.0,
    "traffic": {"bytes_sent": 1_000_000, "bytes_received": 2_000_000},
    "rounds": {"completed": 5, "failed": 1, "steps_lost": 4, "late": 0}, "refused": {"invalid": 3},
    "quarantine": {"w9": 2},
}  # fmt: skip


def member(**more: Any) -> dict[str, Any]:
    """As a worker knows one."""
    known = {"peer": "w0", "address": "w0:7700", "health": "alive", "phase": "training", "step": 90}
    return known | {"rtt_ms": 12.5, "versions": [4, 3]} | more


def cells(*peers: PeerSummary) -> list[dict[str, str]]:
    heads, rows = SwarmSummary(peers=peers).table()
    return [dict(zip(heads, row, strict=True)) for row in rows]


def test_a_peer_is_shown_by_its_own_word():
    assert cells(summary_of(member(), OWN)) == [
        {
            "peer": "w0", "address": "w0:7700", "state": "training", "step": "100",
            "a second": "10 steps", "loss": "2.500", "rounds": "5", "RTT": "12.5 ms",
            "sent": "1.0 MB", "received": "2.0 MB",
            "not taken": "round failed 1, step lost 4, invalid 3, quarantine w9 2",
        }
    ]  # fmt: skip


def test_its_relays_are_named():
    relayed = summary_of(member(address="w0@w1:7700,w2:7700"), None, {"w1:7700": "w1"})
    direct = summary_of(member(), OWN)
    assert [row["relayed by"] for row in cells(relayed, direct)] == ["w1 or w2:7700", "-"]


def test_the_slowest_peer_at_work_says_how_far_the_run_is():
    states = [("training", 100, 10.0), ("training", 80, 8.0), ("dead", 20, 1.0)]
    peers = [
        PeerSummary(f"w{n}", state=state, step=step, steps=400, steps_per_s=pace, tokens_per_s=9.0)
        for n, (state, step, pace) in enumerate(states)
    ]
    swarm = SwarmSummary(peers=peers)
    assert (swarm.step, swarm.steps, swarm.left_s) == (80, 400, 40.0)
    assert ("tokens a second", "18") in swarm.facts()
    assert swarm.line() == (
        "peers 2 training, 1 dead  step 80 of 400  tokens a second 18  to go about 40 s"
    )
    assert SwarmSummary(peers=[peers[2]]).step == 20
    assert SwarmSummary(peers=[]).facts() == [("peers", "")]


@pytest.mark.parametrize("value", [None, "x", [], {}, float("nan"), 2**63, True, 1e308])
def test_a_document_may_hold_anything(value):
    for key in (*OWN, *member()):
        peers = [summary_of(member(**{key: value}), OWN | {key: value}), summary_of(member(), OWN)]
        assert SwarmSummary(peers=peers).line().startswith("peers ")
        assert len(cells(*peers)) == 2
