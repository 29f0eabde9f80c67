"""One pair round: who opens which stream, when a round is staged, and how it ends."""

import pytest

from murmuration.worker.exchange.pairwise.round import (
    CallPartner,
    Event,
    Failed,
    GivenUp,
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
    PATIENCE,
    begin,
    met,
    staged,
)

# ------------------------------------------------------------------------- the undisturbed round


def test_alone_it_succeeds_at_once_and_tells_nobody() -> None:
    machine = begin(group="a")
    assert machine.waiting_for == ()
    assert machine.step(RoundTick(), 0.0) == [Succeeded()]
    assert machine.step(RoundTick(), 0.1) == []


def test_the_one_whose_name_comes_first_opens_the_stream_once() -> None:
    first, second = begin("a"), begin("b")
    assert first.step(RoundTick(), 0.0) == [CallPartner("b", 1)]
    assert first.step(RoundTick(), 1.0) == []
    assert second.step(RoundTick(), 0.0) == []


def test_in_a_larger_group_there_is_one_stream_between_every_two() -> None:
    opened = {me: begin(me, "abcd").step(RoundTick(), 0.0) for me in "abcd"}
    assert opened == {
        "a": [CallPartner("b", 1), CallPartner("c", 1), CallPartner("d", 1)],
        "b": [CallPartner("c", 1), CallPartner("d", 1)],
        "c": [CallPartner("d", 1)],
        "d": [],
    }


def test_a_pair_stages_its_partners_values_and_succeeds_when_the_partner_has_too() -> None:
    machine = met()
    assert machine.step(PartnerComplete("b"), 1.0) == [StageRound()]
    assert machine.waiting_for == ("b",)
    assert machine.step(PartnerStaged("b"), 1.1) == [Succeeded()]
    assert machine.waiting_for == ()


def test_the_partners_word_alone_is_not_enough() -> None:
    machine = met()
    assert machine.step(PartnerStaged("b"), 1.0) == []
    assert machine.step(PartnerComplete("b"), 1.1) == [StageRound(), Succeeded()]


def test_values_count_as_having_come() -> None:
    machine = begin()
    machine.step(RoundTick(), 0.0)
    machine.step(PartnerComplete("b"), 1.0)
    assert machine.step(RoundTick(), PATIENCE) == []


def test_it_stages_once_though_values_come_again() -> None:
    machine = met()
    assert machine.step(PartnerComplete("b"), 1.0) == [StageRound()]
    assert machine.step(PartnerComplete("b"), 1.1) == []
    assert machine.step(RoundTick(), 1.2) == []


@pytest.mark.parametrize("group", ["abc", "abcd"])
def test_a_larger_group_stages_when_all_values_are_here_and_succeeds_when_all_have_staged(
    group: str,
) -> None:
    machine, partners = met("a", group), group[1:]
    for peer in partners[:-1]:
        assert machine.step(PartnerComplete(peer), 1.0) == []
    assert machine.step(PartnerComplete(partners[-1]), 1.0) == [StageRound()]
    for peer in partners[:-1]:
        assert machine.step(PartnerStaged(peer), 2.0) == []
    assert machine.waiting_for == (partners[-1],)
    assert machine.step(PartnerStaged(partners[-1]), 2.0) == [Succeeded()]


# ----------------------------------------------------------------------- those who do not come


def test_a_partner_that_does_not_come_is_waited_for_until_the_patience_ends() -> None:
    machine = begin()
    machine.step(RoundTick(), 0.0)
    assert machine.step(RoundTick(), PATIENCE - 0.01) == []
    assert machine.step(RoundTick(), PATIENCE) == [
        Failed("b has not come to the round in time", ("b",))
    ]


def test_a_partner_that_is_heard_of_is_waited_for_longer_but_not_beyond_the_deadline() -> None:
    machine = begin()
    machine.step(RoundTick(), 0.0)
    assert machine.step(PartnerHeard("b"), 1.5) == []
    assert machine.step(RoundTick(), 3.4) == []
    assert machine.step(RoundTick(), 1.5 + CONFIG.patience_s) == [
        Failed("b has not come to the round in time", ("b",))
    ]
    machine = begin()
    for now in range(int(DEADLINE)):
        machine.step(PartnerHeard("b"), float(now))
    assert machine.step(PartnerHeard("b"), DEADLINE) == [
        Failed("the round's deadline has passed", ("b",))
    ]


def test_whoever_has_come_in_time_may_take_longer_for_its_values() -> None:
    machine = met()
    assert machine.step(RoundTick(), DEADLINE - 0.01) == []


def test_one_of_a_group_that_does_not_come_ends_the_round() -> None:
    machine = begin(group="abc")
    machine.step(RoundTick(), 0.0)
    machine.step(PartnerComplete("b"), 1.0)
    machine.step(PartnerStaged("b"), 1.0)
    assert machine.step(RoundTick(), PATIENCE) == [
        Failed("c has not come to the round in time", ("c",))
    ]


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        (view("a"), "b is gone"),  # nobody has heard of it
        (view("a", dead="b"), "b is gone"),
        (view("a", left="b"), "b is gone"),
        (view("a", suspect="b"), "b does not answer"),
        (view("a", ahead="b"), "b is past this round"),
        (view("a", done="b"), "b is past this round"),
    ],
    ids=["unknown", "dead", "left", "suspect", "ahead", "done"],
)
def test_a_partner_that_cannot_come_is_not_waited_for(seen: View, reason: str) -> None:
    assert begin(seen=seen).step(RoundTick(), 0.0) == [Failed(reason, ("b",))]
    machine = begin()
    machine.step(RoundTick(), 0.0)
    assert machine.step(ViewUpdated(seen), 0.5) == [Failed(reason, ("b",))]


def test_a_partner_that_is_ahead_of_an_earlier_round_may_still_come_to_this_one() -> None:
    machine = begin(seen=view("a", ahead="b"), round_=1)
    assert machine.step(RoundTick(), 0.0) == [CallPartner("b", 1)]


@pytest.mark.parametrize(
    "seen", [view("a", suspect="b"), view("a", ahead="b")], ids=["suspect", "ahead"]
)
def test_doubts_do_not_matter_once_the_partner_has_come(seen: View) -> None:
    machine = met()
    assert machine.step(ViewUpdated(seen), 0.5) == []
    assert machine.step(PartnerComplete("b"), 1.0) == [StageRound()]
    assert machine.step(PartnerStaged("b"), 1.0) == [Succeeded()]


@pytest.mark.parametrize("seen", [view("a", dead="b"), view("a", left="b")], ids=["dead", "left"])
def test_a_partner_that_goes_before_its_values_are_here_ends_the_round(seen: View) -> None:
    assert met().step(ViewUpdated(seen), 0.5) == [Failed("b is gone", ("b",))]


def test_a_partner_that_goes_after_its_word_is_not_needed() -> None:
    machine = met("a", "abc")
    machine.step(PartnerComplete("b"), 1.0)
    machine.step(PartnerStaged("b"), 1.0)
    assert machine.step(ViewUpdated(view("ac", dead="b")), 2.0) == []
    assert machine.step(PartnerComplete("c"), 3.0) == [StageRound()]
    assert machine.step(PartnerStaged("c"), 3.0) == [Succeeded()]


# ---------------------------------------------------------------------------- how else it ends


def test_the_deadline_ends_the_round_with_what_has_gone_wrong_and_who_is_missing() -> None:
    machine = met("a", "abcd")
    machine.step(PartnerComplete("b"), 1.0)
    machine.step(PartnerStaged("b"), 1.0)
    for peer in "dc":
        machine.step(PartnerLost(peer, 1, f"{peer}: reset"), DEADLINE - 1)
    machine.step(RoundTick(), DEADLINE - 0.75)
    reason = "the round's deadline has passed; c: reset; d: reset"
    assert machine.step(RoundTick(), DEADLINE) == [Failed(reason, ("c", "d"))]


@pytest.mark.parametrize("doubted", [False, True], ids=["trusted", "suspected"])
def test_a_partner_cut_off_is_not_waited_for_until_the_deadline(doubted: bool) -> None:
    """Its next partner waits for this peer as long: half as long if membership doubts it too."""
    machine, patience_s = met(), CONFIG.patience_s
    machine.step(PartnerLost("b", 1, "b: reset"), 1.0)
    if doubted:
        machine.step(ViewUpdated(view("a", suspect="b")), 1.0)
    until = 1.0 + (patience_s / 2 if doubted else patience_s)
    assert not any(isinstance(a, Failed) for a in machine.step(RoundTick(), until - 0.01))
    assert machine.step(RoundTick(), until) == [
        Failed("b: reset, and it has not come back", ("b",))
    ]


@pytest.mark.parametrize("me", ["a", "b"])
def test_a_partner_behind_a_link_that_is_known_to_be_cut_is_not_waited_for(me: str) -> None:
    """Either may have said so; whoever comes to the round later does not wait at all."""
    machine, partner = begin(me), "b" if me == "a" else "a"
    machine.step(PartnerCame(partner), 0.5)
    machine.step(PartnerLost(partner, 1 if me == "a" else 0, "cut"), 0.9)
    cut = view("abc", unreachable="ba")
    (failed,) = machine.step(ViewUpdated(cut), 1.0)
    assert failed == Failed(f"the link to {partner} is cut", (partner,))
    assert begin(me, seen=cut).step(RoundTick(), 0.0) == [failed]
    assert not any(isinstance(a, Failed) for a in begin("c", "ac", seen=cut).step(RoundTick(), 0.0))


def test_a_partner_whose_values_are_coming_is_waited_for_though_probes_fail() -> None:
    machine = met()
    cut = view("ab", unreachable="ab")
    assert machine.step(ViewUpdated(cut), 1.0) == []
    assert machine.step(PartnerComplete("b"), 1.1) == [StageRound()]


def test_a_frozen_partner_is_not_waited_for_until_membership_buries_it() -> None:
    machine = met()
    machine.step(PartnerHeard("b"), 5.0)
    machine.step(ViewUpdated(view("a", suspect="b")), 5.5)
    until = 5.0 + CONFIG.patience_s / 2
    assert not any(isinstance(a, Failed) for a in machine.step(RoundTick(), until - 0.01))
    assert machine.step(RoundTick(), until) == [Failed("b does not answer any more", ("b",))]


def test_a_partner_that_freezes_when_everything_is_here_may_have_applied_it() -> None:
    machine = staged()
    machine.step(ViewUpdated(view("a", suspect="b")), 1.5)
    assert not any(isinstance(a, Failed) for a in machine.step(RoundTick(), DEADLINE - 1))


def test_who_may_be_ahead_waits_for_so_much_longer() -> None:
    machine = begin(lead_s=7.0)
    machine.step(RoundTick(), 0.0)
    assert not any(isinstance(a, Failed) for a in machine.step(RoundTick(), PATIENCE + 6.9))
    late = Failed("b has not come to the round in time", ("b",))
    assert machine.step(RoundTick(), PATIENCE + 7.0) == [late]


def test_nobody_waits_beyond_the_deadline_however_far_it_may_be_ahead() -> None:
    assert begin(lead_s=1e6).patience_until == DEADLINE


def test_a_partner_that_came_back_is_waited_for() -> None:
    machine = met()
    machine.step(PartnerLost("b", 1, "b: reset"), 1.0)
    machine.step(PartnerComplete("b"), 2.0)
    assert not any(isinstance(a, Failed) for a in machine.step(RoundTick(), 30.0))


def test_a_partner_that_declines_ends_the_round() -> None:
    machine = met("a", "abc")
    machine.step(PartnerComplete("b"), 1.0)
    assert machine.step(PartnerDeclined("c", "its group is another"), 1.0) == [
        Failed("c declines: its group is another", ("b", "c"))
    ]


def test_the_peer_itself_may_go_on_without_the_round() -> None:
    assert met().step(GivenUp("it leaves"), 1.0) == [Failed("it leaves", ("b",))]


EVERYTHING: list[Event] = [
    RoundTick(),
    ViewUpdated(view("a")),
    PartnerCame("b"),
    PartnerHeard("b"),
    PartnerComplete("b"),
    PartnerStaged("b"),
    PartnerLost("b", 1, "reset"),
    PartnerDeclined("b", "no"),
    GivenUp("no"),
]


@pytest.mark.parametrize("late", EVERYTHING, ids=lambda event: type(event).__name__)
@pytest.mark.parametrize("succeeds", [True, False], ids=["succeeded", "failed"])
def test_nothing_happens_after_the_end(late: Event, succeeds: bool) -> None:
    machine = met()
    if succeeds:
        machine.step(PartnerComplete("b"), 1.0)
        assert machine.step(PartnerStaged("b"), 1.0) == [Succeeded()]
    else:
        assert machine.step(GivenUp("it leaves"), 1.0) == [Failed("it leaves", ("b",))]
    assert machine.step(late, 1.1) == []
    assert machine.step(late, LIMIT) == []


# ------------------------------------------------------------------------------ broken streams


def test_a_broken_stream_raises_doubt_and_is_opened_again_after_a_pause() -> None:
    machine = met()
    assert machine.step(PartnerLost("b", 1, "reset"), 1.0) == [Suspect("b")]
    assert machine.step(RoundTick(), 1.2) == []
    assert machine.step(RoundTick(), 1.25) == [CallPartner("b", 2)]
    assert machine.step(PartnerLost("b", 2, "reset"), 1.3) == [Suspect("b")]
    assert machine.step(RoundTick(), 1.55) == [CallPartner("b", 3)]


def test_what_an_earlier_attempt_reports_is_ignored() -> None:
    machine = met()
    machine.step(PartnerLost("b", 1, "reset"), 1.0)
    machine.step(RoundTick(), 1.25)
    assert machine.step(PartnerLost("b", 1, "reset again"), 1.3) == []
    assert machine.step(RoundTick(), 1.6) == []


def test_only_the_stream_that_broke_is_opened_again() -> None:
    machine = met("b", "abcd")
    assert machine.step(PartnerLost("c", 1, "reset"), 1.0) == [Suspect("c")]
    assert machine.step(RoundTick(), 1.25) == [CallPartner("c", 2)]


def test_the_one_that_was_called_leaves_calling_again_to_the_other() -> None:
    machine = met("b", "ab")
    assert machine.step(PartnerLost("a", 0, "reset"), 1.0) == [Suspect("a")]
    assert machine.step(RoundTick(), 2.0) == []
