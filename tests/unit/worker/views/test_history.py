"""The memory of the page: bounded, checked, and by this machine's clock."""

import json
from typing import Any

import pytest

from murmuration.worker.views.history import (
    MOST_NEWS,
    MOST_PEERS,
    MOST_POINTS,
    MOST_ROUNDS,
    POINT,
    History,
    Look,
)

HOSTILE = "<img src=x onerror=alert(1)>"


def status(peer: str, *others: str, **more: Any) -> dict[str, Any]:
    """A worker's status document, made up."""
    member = {"health": "alive", "phase": "training", "step": 9, "address": "a:1"}
    return {
        "peer": peer, "run": "78c7eef3", "preset": "diloco", "phase": "training", "step": 10,
        "steps": 100, "loss": 2.5, "traffic": {"bytes_sent": 1000, "bytes_received": 2000},
        "rounds": {"completed": 1, "failed": 0, "late": 0},
        "members": [{"peer": name} | member for name in (peer, *others)], **more,
    }  # fmt: skip


def look(time_s: float, *documents: dict[str, Any]) -> Look:
    return Look(time_s, documents[0], {each["peer"]: each for each in documents})


@pytest.fixture
def history() -> History:
    return History(2.0)


def both(**more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The words of two peers. Args: more: of the first."""
    return status("w0", "w1", **more), status("w1", "w0")


def test_what_a_dead_peer_said_last_stays(history):
    history.add(look(100.0, status("w0", "w1"), status("w1", "w0", loss=1.5)))
    later = status("w0", "w1")
    later["members"][1]["health"] = "dead"
    history.add(look(102.0, later))
    w1 = history.since(0)["peers"][1]
    assert (w1["state"], w1["live"], w1["loss"], w1["seen_s"]) == ("dead", False, 1.5, 100.0)
    assert history.since(100.0)["news"] == [{"time_s": 102.0, "peer": "w1", "text": "dead"}]


def test_one_look_that_a_peer_misses_is_no_news(history):
    history.add(look(100.0, *both()))
    for time_s, answers in ((102.0, True), (107.0, False)):
        history.add(look(time_s, status("w0", "w1")))
        assert history.since(0)["peers"][1]["answers"] is answers
    assert [each["text"] for each in history.since(102.0)["news"]] == ["does not answer"]


def test_points_are_thinned_out_and_span_the_run(history):
    for number in range(5 * MOST_POINTS):
        history.add(look(100.0 + number, status("w0", step=number)))
    points = history.since(0)["points"]["w0"]
    steps = [row[POINT.index("step")] for row in points]
    assert len(points) <= MOST_POINTS
    assert steps == sorted(steps)
    assert steps[0] == 0
    assert steps[-1] >= 5 * MOST_POINTS - 32


def test_of_rounds_and_news_the_latest_are_kept(history):
    for number in range(3 * MOST_ROUNDS):
        said = {"fragment": 0, "round": number, "began_s_ago": 1.0, "ended_s_ago": 0.5}
        rounds = {"completed": 1, "failed": number, "late": 0}
        history.add(look(100.0 + number, status("w0", recent_rounds=[said], rounds=rounds)))
    kept = [each["round"] for each in history.since(0)["rounds"]["w0"]]
    assert kept == list(range(2 * MOST_ROUNDS, 3 * MOST_ROUNDS))
    assert len(history.since(0)["news"]) == MOST_NEWS


def test_more_peers_than_a_page_shows_take_no_more_memory(history):
    names = [f"p{number}" for number in range(2 * MOST_PEERS)]
    history.add(look(100.0, status("w0", *names)))
    history.add(look(102.0, status("w0", *reversed(names))))
    assert len(history.since(0)["peers"]) == MOST_PEERS
    assert len(history.since(0)["points"]) == MOST_PEERS


def test_a_new_peer_takes_the_place_of_one_that_nobody_names_any_more(history):
    history.add(look(100.0, status("w0", *(f"p{number}" for number in range(MOST_PEERS - 1)))))
    history.add(look(102.0, status("w0", "p0", "new")))
    names = [peer["peer"] for peer in history.since(0)["peers"]]
    assert len(names) == MOST_PEERS
    assert {"w0", "p0", "new"} <= set(names)


def test_rounds_are_placed_on_this_machines_clock_until_they_are_over(history):
    on_its_way = {"fragment": 0, "round": 7, "began_s_ago": 1.5, "ended_s_ago": None}
    over = {
        "fragment": 0, "round": 7, "began_s_ago": 3.5, "ended_s_ago": 1.0, "waited_for": "w1",
        "stall_s": 2.0, "resumed_s_ago": 0.75,
    }  # fmt: skip
    again = {**over, "ended_s_ago": 3.125}
    for time_s, said in ((100.0, on_its_way), (102.0, over), (104.0, again)):
        history.add(look(time_s, status("w0", recent_rounds=[said])))
    (round_,) = history.since(0)["rounds"]["w0"]
    assert (round_["began_s"], round_["ended_s"], round_["resumed_s"]) == (98.5, 101.0, 101.25)
    assert (round_["waited_for"], round_["stall_s"], round_["told_s"]) == ("w1", 2.0, 102.0)


def test_rates_are_of_what_has_grown_lately(history):
    def looked(time_s: float, sent: int, to_w1: int, from_w1: int) -> tuple[Any, Any]:
        first, second = both(traffic={"bytes_sent": sent, "bytes_received": 0})
        first["members"][1] |= {"sent_bytes": to_w1, "received_bytes": from_w1, "rtt_ms": 20.0}
        history.add(look(time_s, first, second))
        told = history.since(0)
        return told["links"][0], told["peers"][0]["sent_mbps"]

    assert looked(100.0, 0, 0, 0)[0]["mbps"] == [None, None]
    link, sent_mbps = looked(102.0, 1_000_000, 500_000, 250_000)
    assert (link["a"], link["b"], link["mbps"], link["rtt_ms"]) == ("w0", "w1", [2.0, 1.0], 20.0)
    assert sent_mbps == 4.0
    assert 3.0 < looked(104.0, 1_000_000, 500_000, 250_000)[1] < 4.0  # of the last twenty seconds
    link, sent_mbps = looked(106.0, 10, 10, 10)  # it was started again
    assert (link["mbps"], sent_mbps) == ([None, None], None)


@pytest.mark.parametrize("value", [None, "x", [], {}, float("nan"), float("inf"), 2**63, True])
def test_a_document_may_hold_anything(history, value):
    document = status("w0", "w1")
    keys = [*document, "recent_rounds", "verdicts", "refused", "quarantine", "waiting_s"]
    for time_s, key in enumerate(keys, 100):
        spoiled = dict.fromkeys(("peer", "health", "round", "fragment", key), value)
        lists = ("members", "recent_rounds", "verdicts")
        for changed in ({key: value}, *({inner: [spoiled, value]} for inner in lists)):
            said = document | changed
            history.add(Look(time_s + 0.5 * (changed.keys() != {key}), said, {"w0": said}))
    json.dumps(history.since(0), allow_nan=False)


def test_texts_of_peers_are_cut_and_made_printable(history):
    history.add(look(100.0, status(HOSTILE + "\x1b[2J" + "x" * 500)))
    (peer,) = history.since(0)["peers"]
    assert peer["peer"].startswith(HOSTILE)
    assert len(peer["peer"]) == 80
    assert peer["peer"].isprintable()
