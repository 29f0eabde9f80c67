"""The page in a browser: what it shows of real workers, and of peers that write what they like."""

import json
import signal
import time
from contextlib import closing
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from murmuration.worker.views import PagePlace
from murmuration.worker.views.history import Look
from murmuration.worker.views.page import PageServer
from tests.support.browser import CHROMIUM, Node, Page, shown
from tests.support.workers import ENDLESS, QUICK, looked, running_swarm, settings_of

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

HOSTILE = "<img src=x onerror=document.title='taken'><b>w1"


def facts(page: Page) -> dict[str, str]:
    """The figures at its head, by name."""
    names, values = page.of("dt"), page.of("dd")
    return {name.text: value.text for name, value in zip(names, values, strict=True)}


def peers(nodes: list[Node]) -> set[str]:
    """Those that these elements stand for; the keys of drawings have none."""
    return {node.attributes["data-peer"] for node in nodes if "data-peer" in node.attributes}


def wait_until(url: str, peer: str, state: str) -> None:
    """Until the server of the page has seen the peer so, and an evaluation: it looks at times."""

    def seen() -> dict[str, Any]:
        with urlopen(f"{url}api/swarm?since=0") as answer:
            told: dict[str, Any] = json.load(answer)
        return dict(told["facts"]) | {row["peer"]: row["state"] for row in told["peers"]}

    looked(seen, lambda told: told.get(peer) == state and "validation loss" in told)


def test_it_shows_a_real_swarm_and_who_died(tmp_path):
    with running_swarm(3, tmp_path, *ENDLESS, *QUICK) as swarm:
        w0 = swarm.start("w0", "--web", "0", *settings_of(run__evaluate_every=10))
        for name in ("w1", "w2"):
            swarm.start(name)
        url = w0.wait_for(lambda e: e["event"] == "page", "address of its page")["url"]
        assert url.startswith("http://127.0.0.1:")
        for worker in swarm.workers.values():
            worker.wait_for_round(5)
        wait_until(url, "w2", "training")
        page = shown(url)

        assert f"run {swarm.status('w0')['run'][:8]} · diloco · seen by w0" in page.of("p")[0].text
        assert facts(page)["peers"] == "3 training"
        assert float(facts(page)["loss"]) > 0
        assert float(facts(page)["validation loss"]) > 0
        assert peers(page.of("tr")) == peers(page.of("g", "node")) == {"w0", "w1", "w2"}
        links = [line.attributes for line in page.of("line", "link") if "data-a" in line.attributes]
        pairs = {(link["data-a"], link["data-b"]) for link in links}
        assert pairs == {("w0", "w1"), ("w0", "w2"), ("w1", "w2")}
        # In the drawing of rounds each peer has some on their way; curves are drawn.
        told = [title.text for title in page.of("title") if "round " in title.text]
        assert {text.split(":")[0] for text in told} == {"w0", "w1", "w2"}
        assert len(page.of("canvas")) == 2

        swarm.workers["w2"].send(signal.SIGKILL)
        wait_until(url, "w2", "dead")
        page = shown(url)
        (dead,) = page.of("g", "node", data_peer="w2")
        assert "dead" in dead.classes
        assert "w2 dead" in dead.text
        assert facts(page)["peers"] == "2 training, 1 dead"
        assert any("w2 dead" in item.text for item in page.of("li"))

        w0.send(signal.SIGTERM)
        assert w0.wait() == 0
        with pytest.raises(URLError):
            urlopen(url)


def test_what_peers_write_is_text_and_off_loopback_wants_a_token(tmp_path):
    members = [
        {"peer": name, "health": "alive", "phase": "training", "address": HOSTILE}
        for name in ("w0", HOSTILE)
    ]
    document = {
        "peer": "w0", "run": HOSTILE, "preset": HOSTILE, "phase": HOSTILE, "members": members,
        "refused": {HOSTILE: 3}, "verdicts": [{"kind": "uplink", "peer": HOSTILE}],
        "recent_rounds": [
            {"fragment": 0, "round": 1, "began_s_ago": 5.0, "ended_s_ago": 1.0,
             "waited_for": HOSTILE, "stall_s": 4.0, "resumed_s_ago": 1.0},
        ],
    }  # fmt: skip

    def look() -> Look:
        return Look(time.time(), document, {"w0": document})

    with closing(PageServer(PagePlace("0.0.0.0:0", tmp_path), look, encrypted=False)) as server:
        url = server.url.replace("0.0.0.0", "127.0.0.1")
        assert server.token_path is not None
        closed, page = shown(url), shown(f"{url}#{server.token_path.read_text()}")
    (notice,) = [node for node in closed.of("p") if node.attributes.get("id") == "notice"]
    assert "wants its token" in notice.text
    assert closed.of("g", "node", data_peer="w0") == []
    assert page.of("img") == page.of("b") == []
    assert any(item.text.startswith(f"{HOSTILE}'s uplink") for item in page.of("li"))
    assert [len(page.of("g", "node", data_peer=peer)) for peer in ("w0", HOSTILE)] == [1, 1]
    assert "taken" not in page.of("title")[0].text
