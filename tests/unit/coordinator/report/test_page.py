"""The page as coordinator and launcher serve it: all peers asked as `status --watch` asks them."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from coordinator import Failure
from coordinator.report.page import serve_page
from coordinator.report.watch import Watch
from protos.exit_codes import ExitCode
from worker.views import PagePlace

MEMBERS = [
    {"peer": name, "address": f"{name}:7700", "health": "alive", "phase": "training", "step": 5}
    for name in ("w0", "w1")
]
COORDINATOR = {"kind": "coordinator", "run": "aa", "members": MEMBERS}
WORKER = {"peer": "w0", "preset": "noloco", "phase": "training", "step": 7, "members": MEMBERS}


def answer(address: str, _timeout_s: float) -> dict[str, Any]:
    """Of a coordinator, and of one of its two workers."""
    answers: dict[str, dict[str, Any]] = {"c:7600": COORDINATOR, "w0:7700": WORKER}
    if address not in answers:
        raise Failure(f"{address} does not answer", ExitCode.UNREACHABLE)
    return answers[address]


def read(url: str, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """What the page is told, once it is as wanted."""
    deadline = time.monotonic() + 60
    while True:
        with urlopen(f"{url}api/swarm") as told:
            document: dict[str, Any] = json.load(told)
        if wanted(document):
            return document
        assert time.monotonic() < deadline, document


def test_each_peer_is_shown_by_its_own_word_where_it_answers(tmp_path: Path) -> None:
    place = PagePlace("127.0.0.1:0", tmp_path)
    page = serve_page(place, Watch("c:7600", answer), encrypted=False)
    try:
        told = read(page.url, lambda told: bool(told["peers"]))
    finally:
        page.close()
    assert told["swarm"] == {
        "run": "aa",
        "preset": "noloco",
        "seen_by": "the coordinator",
        "encrypted": False,
    }
    rows = [(row["peer"], row["answers"], row["step"]) for row in told["peers"]]
    assert rows == [("w0", True, 7), ("w1", False, 5)]


def test_where_nobody_answers_the_page_is_served_all_the_same(tmp_path: Path) -> None:
    place = PagePlace("127.0.0.1:0", tmp_path)
    page = serve_page(place, Watch("nobody:1", answer), encrypted=False)
    try:
        told = read(page.url, lambda told: True)
    finally:
        page.close()
    assert (told["peers"], told["time_s"]) == ([], 0.0)


def test_a_port_that_is_taken_is_one_line(tmp_path: Path) -> None:
    place = PagePlace("127.0.0.1:0", tmp_path)
    page = serve_page(place, Watch("nobody:1", answer), encrypted=False)
    taken = page.url.removeprefix("http://").rstrip("/")
    try:
        with pytest.raises(
            Failure, match=f"^cannot listen on {taken}: .*--web HOST:PORT"
        ) as refused:
            serve_page(PagePlace(taken, tmp_path), Watch("nobody:1", answer), encrypted=False)
    finally:
        page.close()
    assert refused.value.exit_code == ExitCode.ADDRESS_IN_USE
