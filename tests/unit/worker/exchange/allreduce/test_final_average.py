"""The pass that ends a run in pairs: who is waited for, how long, and when it is tried again."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from murmuration.worker.exchange.allreduce.checks import Checks
from murmuration.worker.exchange.allreduce.closing import ReducedShards
from murmuration.worker.exchange.allreduce.final_average import FinalAverage
from murmuration.worker.exchange.round_context import Context
from murmuration.worker.exchange.view import View
from murmuration.worker.membership import Member
from murmuration.worker.simulation.virtual_loop import VirtualLoop as Clock
from murmuration.worker.training.mailbox import Begin, RoundDone, RoundFailed
from tests.protocol.views import member
from tests.unit.worker.exchange.allreduce.layouts import CONFIG, ROUND_S, Bench, on_a_loop

ROUND = 4
BEGIN = Begin(0, ROUND, (), torch.ones(1))
DONE = RoundDone(ROUND, torch.ones(1), 1, ("a",), (), fragment=0)
FAILED = RoundFailed(0, ROUND, "no", ())


@pytest.fixture
def clock() -> Iterator[Clock]:
    with on_a_loop() as clock:
        yield clock


def here(peer: str, version: int = ROUND, **changes: Any) -> Member:
    return member(peer, versions=(version,), **changes)


class Means:
    """Takes the place of the rounds that the pass holds."""

    def __init__(self, context: Context) -> None:
        self.checks = Checks(context, ReducedShards(context), {})
        self.groups: list[str] = []
        self.given_up: list[str] = []

    async def begin(self, begin: Begin) -> None:
        self.groups.append("".join(begin.group))

    def give_up(self, fragment: int, reason: str) -> None:
        self.given_up.append(reason)

    def tick(self) -> None:
        pass

    def on_view(self, view: View) -> None:
        pass

    def advanced(self, fragment: int, version: int, group: tuple[str, ...]) -> None:
        assert version == ROUND


class Last(Bench):
    """A peer that has come to the end."""

    def __init__(self, clock: Clock, *members: Member) -> None:
        super().__init__("a", clock)
        self.means, self.results = Means(self.context), list[RoundDone | RoundFailed]()
        self.last = FinalAverage(self.context, self.means, self, self)  # type: ignore[arg-type]
        self.last._contributor = self.means  # type: ignore[assignment]
        self.sees(*members)
        with pytest.raises(StopIteration):
            self.last.begin(BEGIN).send(None)
        self.settle()

    def finished(self, result: RoundDone | RoundFailed) -> None:
        self.results.append(result)

    def sees(self, *members: Member) -> None:
        self.last.on_view(View({each.peer: each for each in members}))
        self.settle()

    def at(self, now: float) -> list[str]:
        """The groups of the means that were held by then."""
        self.now = now
        self.last.tick()
        self.settle()
        return self.means.groups


def test_a_mean_that_failed_is_tried_again_over_those_that_are_here_then(clock: Clock) -> None:
    made = Last(clock, here("a"), here("b"))
    made.now = 5.0
    made.last.finished(FAILED)
    made.sees(here("a"))
    assert made.at(5.4) == ["ab"]
    assert made.at(5.5) == ["ab", "a"]


def test_a_mean_that_fails_after_the_deadline_ends_the_pass(clock: Clock) -> None:
    made = Last(clock, here("a"))
    made.now = CONFIG.grace_s + ROUND_S
    made.last.finished(FAILED)
    assert made.results == [FAILED]


def test_a_pass_that_is_given_up_ends_at_once_or_with_its_mean(clock: Clock) -> None:
    waiting = Last(clock, here("a"), here("b", 0))
    waiting.last.give_up(0, "another state")
    (ended,) = waiting.results
    assert isinstance(ended, RoundFailed)
    assert ended.reason == "another state"
    running = Last(clock, here("a"))
    running.last.give_up(0, "another state")
    assert (running.means.given_up, running.results) == (["another state"], [])
    running.last.finished(FAILED)
    assert running.results == [FAILED]
