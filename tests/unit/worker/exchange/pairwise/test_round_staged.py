"""One pair round: who has staged no longer knows whether the others have applied the round."""

import pytest

from murmuration.worker.exchange.pairwise.round import (
    CallPartner,
    Event,
    Failed,
    PartnerCame,
    PartnerComplete,
    PartnerDeclined,
    PartnerHeard,
    PartnerLost,
    PartnerStaged,
    RoundTick,
    StageRound,
    Succeeded,
    Suspect,
    ViewUpdated,
)
from murmuration.worker.exchange.view import View
from tests.protocol.views import view
from tests.unit.worker.exchange.pairwise.round_starts import (
    CONFIG,
    DEADLINE,
    LIMIT,
    begin,
    met,
    staged,
)


@pytest.mark.parametrize("seen", [view("a", dead="b"), view("a", left="b")], ids=["dead", "left"])
def test_whoever_has_staged_does_not_believe_at_once_that_a_partner_is_gone(seen: View) -> None:
    """The partner may have applied the round, and a rumour is soon refuted if it is wrong."""
    machine = staged()
    assert machine.step(ViewUpdated(seen), 2.0) == []
    assert machine.step(RoundTick(), 2.0 + CONFIG.patience_s - 0.01) == []
    assert machine.step(RoundTick(), 2.0 + CONFIG.patience_s) == [Failed("b is gone", ("b",))]


@pytest.mark.parametrize(
    "sign",
    [ViewUpdated(view("ab")), PartnerHeard("b"), PartnerCame("b")],
    ids=["alive again", "heard", "met again"],
)
def test_the_time_for_which_a_partner_is_gone_counts_from_its_last_sign_of_life(
    sign: Event,
) -> None:
    machine, gone = staged(), ViewUpdated(view("a", dead="b"))
    assert machine.step(gone, 2.0) == []
    assert machine.step(sign, 3.0) == []
    assert machine.step(gone, 3.0) == []
    assert machine.step(RoundTick(), 3.0 + CONFIG.patience_s - 0.01) == []
    assert machine.step(PartnerStaged("b"), 5.0) == [Succeeded()]


def test_whoever_has_staged_waits_though_the_link_is_known_to_be_cut() -> None:
    """The partner may have applied the round, and the link may come back."""
    machine = met()
    machine.step(PartnerComplete("b"), 1.0)
    assert machine.step(ViewUpdated(view("ab", unreachable="ab")), 1.1) == []
    assert machine.step(PartnerStaged("b"), 1.2) == [Succeeded()]


def test_nothing_is_staged_any_more_at_the_deadline() -> None:
    late = [Failed("the round's deadline has passed", ("b",))]
    assert met().step(PartnerComplete("b"), DEADLINE) == late
    assert met().step(PartnerComplete("b"), DEADLINE - 0.01) == [StageRound()]


def test_whoever_has_staged_waits_for_as_long_as_a_partner_may_still_stage() -> None:
    """The partner began when its patience ended: its own deadline is later by the patience."""
    machine = met()
    machine.step(PartnerComplete("b"), DEADLINE - 0.1)
    assert machine.step(RoundTick(), LIMIT - 0.01) == []
    assert machine.step(PartnerStaged("b"), LIMIT - 0.01) == [Succeeded()]


def test_whoever_has_staged_waits_longer_for_a_partner_that_came_late() -> None:
    """Its anchor had been arriving for so long that it was waited for."""
    machine, came_at = begin(), 10.0
    for now in range(10):
        machine.step(PartnerHeard("b"), float(now))
    machine.step(PartnerCame("b"), came_at)
    machine.step(PartnerComplete("b"), came_at)
    limit = came_at + DEADLINE + CONFIG.retry_s
    assert machine.step(RoundTick(), limit - 0.01) == []
    assert machine.step(RoundTick(), limit) == [Failed("the round's deadline has passed", ("b",))]


@pytest.mark.parametrize(
    ("seen", "patience_s"),
    [
        (view("ab"), 2 * CONFIG.patience_s),
        (view("a", suspect="b"), CONFIG.patience_s / 2),
        (view("a", dead="b"), CONFIG.patience_s / 2),
    ],
    ids=["trusted", "suspected", "dead"],
)
def test_whoever_has_staged_waits_longer_for_a_partner_cut_off_unless_it_is_doubted(
    seen: View, patience_s: float
) -> None:
    """For a broken stream or a doubt there are other reasons than death; for both hardly."""
    machine = staged()
    machine.step(PartnerLost("b", 1, "b: reset"), 1.0)
    machine.step(ViewUpdated(seen), 1.0)
    before = machine.step(RoundTick(), 1.0 + patience_s - 0.01)
    assert not any(isinstance(action, Failed) for action in before)
    assert machine.step(RoundTick(), 1.0 + patience_s) == [
        Failed("b: reset, and it has not come back", ("b",))
    ]


def test_whoever_holds_everything_gives_up_in_the_end_as_well() -> None:
    machine = staged()
    assert machine.step(RoundTick(), LIMIT - 0.01) == []
    assert machine.step(RoundTick(), LIMIT) == [Failed("the round's deadline has passed", ("b",))]


def test_a_word_at_the_deadline_still_counts() -> None:
    machine = met()
    machine.step(PartnerComplete("b"), 1.0)
    assert machine.step(PartnerStaged("b"), DEADLINE) == [Succeeded()]


def test_a_partner_that_declines_after_its_word_is_not_needed() -> None:
    """It lost patience with `c`; others may have heard all by then, and have applied the round."""
    machine = met("a", "abc")
    machine.step(PartnerStaged("b"), 0.5)
    for peer in "bc":
        machine.step(PartnerComplete(peer), 1.0)
    assert machine.step(PartnerDeclined("b", "given up there"), 2.0) == []
    assert machine.step(PartnerStaged("c"), 3.0) == [Succeeded()]


def test_before_it_has_staged_any_partner_that_declines_ends_the_round() -> None:
    """Then nobody can have applied it."""
    machine = met("a", "abc")
    machine.step(PartnerStaged("b"), 0.5)
    assert machine.step(PartnerDeclined("b", "given up there"), 2.0) == [
        Failed("b declines: given up there", ("c",))
    ]


def test_what_is_here_is_not_lost_with_the_stream() -> None:
    machine = met()
    assert machine.step(PartnerComplete("b"), 1.0) == [StageRound()]
    machine.step(PartnerLost("b", 1, "reset"), 1.0)
    assert machine.step(RoundTick(), 1.25) == [CallPartner("b", 2)]
    assert machine.step(PartnerStaged("b"), 1.5) == [Succeeded()]


def test_a_partner_that_has_said_everything_is_called_again_while_it_may_miss_our_word() -> None:
    machine = met("a", "abc")
    machine.step(PartnerComplete("b"), 1.0)
    machine.step(PartnerStaged("b"), 1.0)
    assert machine.step(PartnerLost("b", 1, "reset"), 1.1) == [Suspect("b")]
    assert machine.step(RoundTick(), 1.35) == [CallPartner("b", 2)]


def test_a_stream_that_is_down_is_opened_at_once_when_the_round_succeeds() -> None:
    machine = met("a", "abc")
    for peer in "bc":
        machine.step(PartnerComplete(peer), 1.0)
    machine.step(PartnerStaged("b"), 1.0)
    machine.step(PartnerLost("b", 1, "reset"), 1.1)
    assert machine.step(PartnerStaged("c"), 1.2) == [CallPartner("b", 2), Succeeded()]
