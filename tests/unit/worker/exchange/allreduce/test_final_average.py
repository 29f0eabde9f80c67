"""The pass that ends a run in pairs: who is waited for, how long, and when it is tried again."""

from typing import Any

from tests.protocol.views import member
from worker.exchange.allreduce.final_average import (
    FinalAverage,
    GiveUpMean,
    LayOut,
    MeanEnded,
    PassEnded,
)
from worker.exchange.types import GivenUp, RoundConfig, RoundTick, View, ViewUpdated
from worker.membership import Health, Member, Phase

ROUND = 4
CONFIG = RoundConfig(grace_s=20.0)
ROUND_S = 30.0
TICK = RoundTick()


def seen(*members: Member) -> View:
    return View({each.peer: each for each in members})


def here(peer: str, version: int = ROUND, **changes: Any) -> Member:
    return member(peer, versions=(version,), **changes)


def come(view: View) -> FinalAverage:
    return FinalAverage("a", 0, ROUND, view, CONFIG, 0.0, ROUND_S)


def test_it_is_laid_out_over_all_once_all_have_come() -> None:
    machine = come(seen(here("a"), here("b", ROUND - 1)))
    assert machine.handle(TICK, 1.0) == []
    assert machine.handle(ViewUpdated(seen(here("a"), here("b"))), 2.0) == [LayOut(("a", "b"))]
    assert machine.handle(TICK, 3.0) == []
    assert machine.handle(MeanEnded(failed=False), 4.0) == [PassEnded()]
    assert machine.handle(TICK, 5.0) == []


def test_a_peer_that_has_not_come_is_waited_for_until_the_grace_is_over() -> None:
    machine = come(seen(here("a"), here("b"), here("c", ROUND - 1)))
    assert machine.handle(TICK, CONFIG.grace_s - 0.01) == []
    assert machine.handle(TICK, CONFIG.grace_s) == [LayOut(("a", "b"))]


def test_peers_that_are_gone_or_do_not_train_are_not_waited_for() -> None:
    starting = member("d", phase=Phase.STARTING, versions=())
    dead, done = here("b", 0, health=Health.DEAD), here("c", phase=Phase.DONE)
    machine = come(seen(here("a"), dead, done, starting))
    assert machine.handle(TICK, 1.0) == [LayOut(("a",))]


def test_a_peer_that_is_too_late_says_so() -> None:
    machine = come(seen(here("a"), here("b", ROUND + 1, phase=Phase.DONE)))
    (ended,) = machine.handle(TICK, 1.0)
    assert ended == PassEnded("the others have agreed without this peer")


def test_a_mean_that_failed_is_tried_again_over_those_that_are_here_then() -> None:
    machine = come(seen(here("a"), here("b")))
    assert machine.handle(TICK, 1.0) == [LayOut(("a", "b"))]
    assert machine.handle(MeanEnded(failed=True), 5.0) == []
    assert machine.handle(ViewUpdated(seen(here("a"))), 5.4) == []
    assert machine.handle(TICK, 5.5) == [LayOut(("a",))]


def test_a_mean_that_fails_after_the_deadline_ends_the_pass() -> None:
    machine = come(seen(here("a")))
    machine.handle(TICK, 1.0)
    assert machine.handle(MeanEnded(failed=True), CONFIG.grace_s + ROUND_S) == [PassEnded()]


def test_a_pass_that_is_given_up_ends_at_once_or_with_its_mean() -> None:
    waiting = come(seen(here("a"), here("b", 0)))
    assert waiting.handle(GivenUp("another state"), 1.0) == [PassEnded("another state")]
    running = come(seen(here("a")))
    running.handle(TICK, 1.0)
    assert running.handle(GivenUp("another state"), 2.0) == [GiveUpMean("another state")]
    assert running.handle(MeanEnded(failed=True), 2.0) == [PassEnded()]
