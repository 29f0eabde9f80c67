"""From gossiped profiles to this peer's routes: the same wherever the same was heard."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TypeVar

import pytest

from murmuration.algorithms.skippipe.search import search_routes
from murmuration.worker.membership import Member
from murmuration.worker.pipeline import planner
from murmuration.worker.pipeline.profile import Profile
from murmuration.worker.pipeline.stages_config import StagesConfig
from tests.unit.worker.pipeline.members import context_of, members_of, telling

T = TypeVar("T")
CONFIG = StagesConfig(count=3, routing="skip", skip=0.0, microbatches=2)


@pytest.fixture(autouse=True)
def brief_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "search_routes", partial(search_routes, effort_s=0.1))


class Searches:
    """Stands for the thread that searches: each waits until it is let go."""

    def __init__(self) -> None:
        self.begun = 0
        self._go = asyncio.Event()

    async def __call__(self, work: Callable[[], T], /) -> T:
        self.begun += 1
        await self._go.wait()
        return work()

    async def let_go(self) -> None:
        self._go.set()
        for _ in range(5):
            await asyncio.sleep(0)
        self._go.clear()


class Peer:
    def __init__(self, members: list[Member], name: str = "p0") -> None:
        self.members, self.searches = members, Searches()
        self.events: list[dict[str, object]] = []
        given = {"config": CONFIG, "offload": self.searches, "log": self.events.append}
        self.context = context_of(name, lambda: self.members, **given)
        self.planner = planner.RoutePlanner(self.context)


def measured(seconds: float) -> list[Member]:
    """Two replicas of each of three stages; p4 has taken so long."""
    members = members_of(0, 0, 1, 1, 2, 2)
    return [*members[:4], telling(members[4], Profile(forward_s=seconds)), members[5]]


def crossed(*, near: str, far: str) -> list[Member]:
    """Two replicas of each of three stages; p0 is near one of stage 1, and far from the other."""
    members = members_of(0, 0, 1, 1, 2, 2)
    return [telling(members[0], Profile(latency_s={near: 0.001, far: 2.0})), *members[1:]]


def on_plan(peer: Peer, iteration: int) -> bool:
    """Tells whether the peer's routes are those that a search finds for what it knows."""
    routes, snapshot = peer.planner.routes(iteration)[0], planner.snapshot_of(peer.members)
    assert snapshot is not None
    rules = planner.planned_rules(CONFIG, snapshot, iteration)
    seed = peer.context.seed - 1
    found = planner.search_routes(snapshot.pipeline, rules, [0, 1, 0, 1], seed=seed)
    me = snapshot.peers.index(peer.context.me)
    expected = [r.peers[1:] for r in found if r.origin == me]
    return [tuple(snapshot.peers.index(hop.peer) for hop in route) for route in routes] == expected


def test_the_snapshots_that_are_known_are_bounded():
    peer, names = Peer([]), []
    for n in range(1, 400):
        peer.members = measured(float(n))
        names.append(peer.planner.on_view())
    known = [peer.planner.knows(name) for name in names]
    assert sum(known) == 257  # with the one that is held
    assert known == sorted(known)  # the oldest are forgotten


def test_no_one_peers_word_is_how_long_a_microbatch_takes_on_its_way():
    honest = Profile(activation_bytes=1000)
    for claimed in (1, 10**12):
        told = [honest, replace(honest, activation_bytes=claimed), honest]
        snapshot = planner.snapshot_of(list(map(telling, members_of(0, 1, 2), told)))
        assert snapshot.pipeline.costs.transfer_s.max() == pytest.approx(1000 / 2.5e6)


async def test_routes_found_before_go_on_until_there_are_new_ones():
    peer = Peer(crossed(near="p2", far="p3"))
    peer.planner.routes(1)
    await peer.searches.let_go()
    routes, name = peer.planner.routes(2)
    peer.members = crossed(near="p3", far="p2")
    assert peer.planner.routes(3) == (routes, peer.planner.on_view())
    assert name != peer.planner.on_view()
    assert not on_plan(peer, 3)
    await peer.searches.let_go()
    assert on_plan(peer, 4)
    await peer.planner.close()


async def test_routes_found_before_end_when_a_peer_has_moved():
    """The same peers and stages, but p3 has gone from stage 1 to stage 2, and refuses its hops."""
    peer = Peer(measured(0.1))
    peer.planner.routes(1)
    await peer.searches.let_go()
    peer.members = [*peer.members[:3], replace(peer.members[3], stage=2), *peer.members[4:]]
    routes, name = peer.planner.routes(2)
    assert name == peer.planner.on_view()
    stage_of = {member.peer: member.stage for member in peer.members}
    assert all(stage_of[hop.peer] == hop.stage for route in routes for hop in route)
    await peer.planner.close()


async def test_a_search_that_fails_is_told_once_and_drawn_routes_go_on(monkeypatch):
    def broken(*_: object, **__: object) -> None:
        raise ValueError("no such luck")

    peer = Peer(measured(0.1))
    with monkeypatch.context() as patched:
        patched.setattr("murmuration.worker.pipeline.planner.search_routes", broken)
        for iteration in range(1, 5):
            routes, name = peer.planner.routes(iteration)
            assert (len(routes), name) == (2, peer.planner.on_view())
            await peer.searches.let_go()
    text = "no routes were searched: ValueError: no such luck"
    assert peer.events == [{"event": "warning", "text": text}]
    assert peer.searches.begun == 1
    peer.members = measured(0.3)  # other measurements are searched for again
    peer.planner.routes(5)
    await peer.searches.let_go()
    assert on_plan(peer, 6)
    await peer.planner.close()


async def test_who_does_not_serve_sends_nothing():
    members = measured(0.1)
    assert Peer(members, "p9").planner.routes(1) == ([(), ()], planner.snapshot_name(members))
    assert Peer(members_of(1, 2), "p0").planner.routes(1)[0] == [(), ()]


def test_rules_can_be_kept_whatever_stages_are_left():
    for count, skip in [(2, 0.0), (2, 0.25), *product((4, 6, 9), (0.0, 0.25, 0.5))]:
        config = StagesConfig(count=count, routing="random", skip=skip)
        whole = config.rules(1)
        for left in range(1, count + 1):
            snapshot = planner.snapshot_of(members_of(*range(left)))
            assert snapshot is not None, count
            rules = planner.planned_rules(config, snapshot, 1)
            assert rules.stages == left, count
            assert (rules.visited > 1) == (left > 1), count
            assert rules.stages - rules.visited <= whole.stages - whole.visited, count
            assert left < count or rules == whole
