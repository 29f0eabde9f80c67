"""One pair round: what holds for any events in any order."""

from hypothesis import given, settings
from hypothesis import strategies as st

from murmuration.worker.exchange.pairwise.round import (
    Action,
    CallPartner,
    Event,
    Failed,
    PairRound,
    PartnerCame,
    PartnerComplete,
    PartnerDeclined,
    PartnerHeard,
    PartnerLost,
    PartnerStaged,
    RoundTick,
    StageRound,
    Succeeded,
    ViewUpdated,
)
from murmuration.worker.exchange.view import RoundConfig
from tests.protocol.views import view

CONFIG = RoundConfig(patience_s=20.0, slack_s=40.0)
ROUND_S = 60.0
# Whoever has staged waits for one that came at the very end of its own time.
LIMIT = ROUND_S + ROUND_S + CONFIG.retry_s

steady = settings(deadline=None, derandomize=True, max_examples=100, database=None)


def begin(me: str, group: str) -> PairRound:
    return PairRound(
        me,
        group,
        view(group),
        CONFIG,
        key=(0, 0),
        began_at=0.0,
        payload_bytes=0,
    )


@st.composite
def courses(draw: st.DrawFn) -> tuple[str, str, list[tuple[Event, float]]]:
    """A peer, its group, and anything that may happen to it, in any order."""
    group = "abcd"[: draw(st.integers(2, 4))]
    me = draw(st.sampled_from(group))
    partner = st.sampled_from([peer for peer in group if peer != me])
    views = st.builds(
        lambda doubted, gone: view(
            "".join(set(group) - {doubted, gone}),
            suspect=doubted if doubted != gone else "",
            dead=gone,
        ),
        st.sampled_from(["", *group]),
        st.sampled_from(["", "", "", *group]),
    )
    event: st.SearchStrategy[Event] = st.one_of(
        st.just(RoundTick()),
        st.builds(ViewUpdated, views),
        st.builds(PartnerCame, partner),
        st.builds(PartnerHeard, partner),
        st.builds(PartnerComplete, partner),
        st.builds(PartnerComplete, partner),
        st.builds(PartnerStaged, partner),
        st.builds(PartnerStaged, partner),
        st.builds(PartnerLost, partner, st.integers(0, 3), st.just("reset")),
        st.builds(PartnerDeclined, partner, st.just("no")),
    )
    steps = draw(st.lists(st.tuples(event, st.floats(0.0, 5.0)), max_size=40))
    now, timed = 0.0, []
    for each, passed_s in steps:
        now += passed_s
        timed.append((each, now))
    return me, group, timed


@steady
@given(courses())
def test_a_round_ends_once_and_says_nothing_more(
    course: tuple[str, str, list[tuple[Event, float]]],
) -> None:
    me, group, timed = course
    machine = begin(me, group)
    actions = [action for event, now in timed for action in machine.step(event, now)]
    end = timed[-1][1] if timed else 0.0
    actions += machine.step(RoundTick(), max(end, LIMIT))
    ends = [action for action in actions if isinstance(action, Succeeded | Failed)]
    assert len(ends) == 1
    assert actions[-1] is ends[0]
    assert actions.count(StageRound()) <= 1


@steady
@given(courses())
def test_it_succeeds_only_with_all_values_and_the_word_of_all(
    course: tuple[str, str, list[tuple[Event, float]]],
) -> None:
    me, group, timed = course
    machine, partners = begin(me, group), set(group) - {me}
    received: set[str] = set()
    staged: set[str] = set()
    for event, now in timed:
        match event:
            case PartnerComplete(peer):
                received.add(peer)
            case PartnerStaged(peer):
                staged.add(peer)
        actions = machine.step(event, now)
        if StageRound() in actions:
            assert received == partners
        if Succeeded() in actions:
            assert received == staged == partners


@steady
@given(courses())
def test_a_stream_is_opened_again_only_after_it_broke_and_counts_up(
    course: tuple[str, str, list[tuple[Event, float]]],
) -> None:
    me, group, timed = course
    machine = begin(me, group)
    attempts: dict[str, int] = {}
    running: set[str] = set()
    for event, now in timed:
        match event:
            case PartnerLost(peer, attempt, _) if attempt in (0, attempts.get(peer)):
                running.discard(peer)
        for action in machine.step(event, now):
            if isinstance(action, CallPartner):
                assert action.peer not in running
                assert action.attempt == attempts.get(action.peer, 0) + 1
                attempts[action.peer] = action.attempt
                running.add(action.peer)


@steady
@given(courses())
def test_the_same_events_give_the_same_actions(
    course: tuple[str, str, list[tuple[Event, float]]],
) -> None:
    def play() -> list[Action]:
        machine = begin(me, group)
        return [action for event, now in timed for action in machine.step(event, now)]

    me, group, timed = course
    assert play() == play()
