"""Who is asked how the swarm is, and who answers for whom."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from murmuration.coordinator.asking import AskedSwarm
from murmuration.protos.exit_codes import ExitCode, MurmurError
from murmuration.worker.views import PagePlace

Document = dict[str, Any]


class FakeSwarm:
    """Answers by address."""

    def __init__(self, *names: str) -> None:
        self.members = [
            {"peer": name, "address": f"{name}:7700", "health": "alive"} for name in names
        ]
        self.documents: dict[str, Document] = {
            f"{name}:7700": {"peer": name, "run": "aa", "members": self.members} for name in names
        }
        self.asked: list[str] = []

    def ask(self, address: str, timeout_s: float) -> Document:
        self.asked.append(address)
        if address not in self.documents:
            raise MurmurError(f"{address} does not answer", ExitCode.UNREACHABLE)
        return self.documents[address]

    def answers(self, address: str = "w0:7700") -> set[str]:
        """Those that a look has an answer of."""
        return set(AskedSwarm(address, self.ask).look().answers)


def test_each_peer_is_asked_itself():
    swarm = FakeSwarm("w0", "w1", "w2")
    assert swarm.answers() == {"w0", "w1", "w2"}
    assert sorted(swarm.asked) == ["w0:7700", "w1:7700", "w2:7700"]  # the first, only once


def test_the_dead_and_the_relayed_are_not_asked_from_here():
    swarm = FakeSwarm("w0", "w1", "w2", "w3")
    swarm.members[1]["health"], swarm.members[2]["health"] = "dead", "left"
    swarm.members[3]["address"] = "w3@w0:7700"
    assert swarm.answers() == {"w0"}
    assert swarm.asked == ["w0:7700"]


def test_another_peer_behind_the_address_is_not_taken_for_the_one_that_had_it():
    swarm = FakeSwarm("w0", "w1")
    swarm.documents["w1:7700"] = {"peer": "w9"}
    assert swarm.answers() == {"w0"}


def test_when_the_first_one_ends_another_is_asked():
    swarm = FakeSwarm("w0", "w1")
    watched = AskedSwarm("w0:7700", swarm.ask)
    watched.look()
    del swarm.documents["w0:7700"]
    assert set(watched.look().answers) == {"w1"}
    del swarm.documents["w1:7700"]
    with pytest.raises(MurmurError, match="w0:7700 does not answer"):
        watched.look()


def test_members_that_are_none_are_passed_over():
    swarm = FakeSwarm("w0")
    swarm.members[:] = [*swarm.members, "w1", {"peer": 3, "health": "alive"}]  # type: ignore[list-item]
    assert swarm.answers() == {"w0"}


@contextmanager
def page_of(swarm: AskedSwarm, folder: Path) -> Iterator[str]:
    page = swarm.serve_page(PagePlace("127.0.0.1:0", folder), encrypted=False)
    try:
        yield page.url
    finally:
        page.close()


def read(url: str, wanted: Callable[[Document], bool]) -> Document:
    """Returns what the page is told, once it is as wanted."""
    deadline = time.monotonic() + 60
    while True:
        with urlopen(f"{url}api/swarm") as told:
            document: Document = json.load(told)
        if wanted(document):
            return document
        assert time.monotonic() < deadline, document


def test_the_page_shows_each_peer_by_its_own_word_where_it_answers(tmp_path):
    """The coordinator knows two workers, of which one answers."""
    swarm = FakeSwarm("w0", "w1")
    swarm.documents["c:7600"] = {"kind": "coordinator", "run": "aa", "members": swarm.members}
    del swarm.documents["w1:7700"]
    with page_of(AskedSwarm("c:7600", swarm.ask), tmp_path) as url:
        told = read(url, lambda told: bool(told["peers"]))
    assert (told["swarm"]["run"], told["swarm"]["seen_by"]) == ("aa", "the coordinator")
    assert [(row["peer"], row["answers"]) for row in told["peers"]] == [("w0", True), ("w1", False)]


def test_where_nobody_answers_the_page_is_served_all_the_same_and_only_once(tmp_path):
    swarm = AskedSwarm("nobody:1", FakeSwarm().ask)
    with page_of(swarm, tmp_path) as url:
        told = read(url, lambda told: True)
        taken = url.removeprefix("http://").rstrip("/")
        says = f"^cannot listen on {taken}: .*--web HOST:PORT"
        with pytest.raises(MurmurError, match=says) as refused:
            swarm.serve_page(PagePlace(taken, tmp_path), encrypted=False)
    assert (told["peers"], told["time_s"]) == ([], 0.0)
    assert refused.value.exit_code == ExitCode.ADDRESS_IN_USE
