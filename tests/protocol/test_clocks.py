"""The wall clock jumps while a swarm trains: nothing comes of it."""

import time
from pathlib import Path

import pytest

from murmuration.worker.identity import Authority
from tests.protocol.problem import steady
from tests.protocol.swarm import Swarm
from tests.protocol.virtual_time import run

HOUR_S = 3600


class WallClock:
    """Time as the system tells it, moved by `ahead_s`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead_s = 0
        seconds, nanoseconds = time.time, time.time_ns
        monkeypatch.setattr(time, "time", lambda: seconds() + self.ahead_s)
        monkeypatch.setattr(time, "time_ns", lambda: nanoseconds() + self.ahead_s * 10**9)


@pytest.mark.parametrize(
    ("jumps_s", "encrypted"),
    [
        ((HOUR_S, -HOUR_S), False),
        ((HOUR_S, -HOUR_S), True),
        ((-25 * HOUR_S, 0), True),
        ((0, -25 * HOUR_S), True),
    ],
)
def test_a_jump_of_the_wall_clock_has_no_effect(
    jumps_s: tuple[int, int], encrypted: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In the middle of rounds, twice; a peer joins in between, and one is killed and comes back,
    each with an epoch by the clock of then."""
    clock = WallClock(monkeypatch)

    async def scenario() -> None:
        authority = Authority.make(tmp_path) if encrypted else None
        async with Swarm(steady(60), authority=authority) as swarm:
            swarm.epochs_by_clock = True
            await swarm.start(*"abc")
            await swarm.until(lambda: swarm["a"].versions >= (2,), 60)
            await swarm.sleep(0.2)
            clock.ahead_s = jumps_s[0]
            await swarm.join("d", via="a")
            await swarm.until(lambda: swarm["a"].versions >= (5,), 60)
            await swarm.sleep(0.2)
            clock.ahead_s = jumps_s[1]
            swarm.kill("c")
            await swarm.sleep(8)
            await swarm.restart("c", via="a")
            await swarm.finished()
            swarm.assert_equal(versions=(12,))
            for name in "abd":
                assert swarm[name].of_kind("round_failed") == []
            assert swarm["a"].of_kind("round")[-1]["contributors"] == 4

    run(scenario())


@pytest.mark.parametrize("jump_s", [HOUR_S, -HOUR_S])
def test_rounds_end_as_they_would_have(jump_s: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values, round for round, and nobody is suspected."""
    clock = WallClock(monkeypatch)

    async def scenario() -> None:
        async with Swarm(steady(30)) as swarm:
            await swarm.start(*"abcd")
            for version in range(1, 6):
                await swarm.until(lambda v=version: swarm["a"].versions >= (v,), 60)
                clock.ahead_s += jump_s
            await swarm.finished()
            swarm.assert_reference()
            for peer in swarm.alive:
                assert peer.of_kind("round_failed") == []
                assert {event["contributors"] for event in peer.of_kind("round")} == {4}

    run(scenario())
