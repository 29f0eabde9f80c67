"""Links, transfers and streams: closed forms, and what is left when something ends early."""

from random import Random

import pytest
from hypothesis import given, strategies as st

from murmuration.algorithms.link import Link
from murmuration.worker.simulation import Scenario
from murmuration.worker.simulation.network import Network, Pipe
from murmuration.worker.simulation.virtual_loop import Act, VirtualLoop


class World:
    """Four peers; `broken` collects who found out about a broken stream, and when."""

    def __init__(self, **link: float) -> None:
        self.clock = VirtualLoop()
        self.broken: list[tuple[float, int]] = []
        self.seen: list[tuple[float, str]] = []
        shaped = Link(**{"rate_mbps": 8.0, "delay_s": 0.25} | link)
        self.network = Network(
            self.clock, Scenario(peers=4, link=shaped), Random(1),
            lambda end, _: self.broken.append((self.clock.now, end)),
        )  # fmt: skip

    def see(self, name: str) -> Act:
        return lambda: self.seen.append((round(self.clock.now, 9), name))

    def run(self) -> None:
        self.clock.run(lambda: False, 1e6)

    def send(self, caller: int, callee: int, name: str) -> None:
        """A megabyte, which is seen when it is there."""
        self.network.open(caller, callee).send(caller, self.see(name), 1_000_000)


@given(st.lists(st.floats(1, 1e6), min_size=1, max_size=12))
def test_loads_that_begin_together_end_as_equal_shares_say(sizes):
    clock, rate = VirtualLoop(), 1000.0
    pipe, ends = Pipe(clock, rate), dict[int, float]()
    for number, size in enumerate(sizes):
        pipe.add(size, lambda n=number: ends.setdefault(n, clock.now))
    clock.run(lambda: False, limit_s=1e9)
    for number, size in enumerate(sizes):
        # While it is under way, each of the others gets as much as it does, or all it wants.
        assert ends[number] == pytest.approx(sum(min(size, other) for other in sizes) / rate)


def test_bytes_take_their_time_on_the_link_once_and_the_delay_once():
    world = World()
    world.send(0, 1, "here")
    world.run()
    assert world.seen == [(1.25, "here")]
    assert world.network.sent_bytes == 1_000_000


def test_two_senders_share_the_link_of_one_receiver():
    world = World()
    for caller, callee, name in ((0, 2, "a"), (1, 2, "b"), (3, 1, "c")):
        world.send(caller, callee, name)
    world.run()
    assert sorted(world.seen) == [(1.25, "c"), (2.25, "a"), (2.25, "b")]


def test_loss_breaks_streams_as_often_as_both_links_together_say():
    world = World(loss=3.0)
    streams = [world.network.open(0, 1) for _ in range(2000)]
    world.run()
    assert all(stream.ended for stream in streams)
    mean_s = sum(time_s for time_s, _ in world.broken) / len(world.broken)
    assert mean_s == pytest.approx(60 / (2 * 3.0), rel=0.1)
