"""One pair round: what holds for any events in any order."""

from typing import Any

from hypothesis import given, settings, strategies as st

from murmuration.worker import wire
from murmuration.worker.exchange.pairwise.round import PARTS, PairRound, TheirPart
from murmuration.worker.exchange.round_context import RoundConfig
from murmuration.worker.exchange.view import View
from tests.protocol.views import view

CONFIG = RoundConfig(patience_s=20.0, slack_s=40.0)
ROUND_S = 60.0
# A peer that is prepared waits for one that came at the very end of its own time.
LIMIT = ROUND_S + ROUND_S + CONFIG.retry_s
PREPARED, SUCCEEDED, FAILED = "prepared", "succeeded", "failed"
Course = tuple[str, str, list[tuple[tuple[Any, ...], float]]]

steady = settings(deadline=None, derandomize=True, max_examples=100, database=None)


@st.composite
def courses(draw: st.DrawFn) -> Course:
    """A peer, its group, and anything that may happen to it, in any order."""
    group = "abcd"[: draw(st.integers(2, 4))]
    me = draw(st.sampled_from(group))
    partner = st.sampled_from([peer for peer in group if peer != me])

    def seen(doubted: str, gone: str) -> View:
        there = "".join({*group} - {doubted, gone})
        return view(there, suspect="" if doubted == gone else doubted, dead=gone)

    doubted, gone = (st.sampled_from([*[""] * none, *group]) for none in (1, 3))
    views = st.builds(seen, doubted, gone)
    simple = st.sampled_from(["came", "heard", "complete", "complete", "prepared", "prepared"])
    event = st.one_of(
        st.just(("tick",)),
        st.tuples(st.just("view"), views),
        st.tuples(simple, partner),
        st.tuples(st.just("lost"), partner, st.integers(0, 3), st.just("reset")),
        st.tuples(st.just("declines"), partner, st.just("no")),
    )
    steps = draw(st.lists(st.tuples(event, st.floats(0.0, 5.0)), max_size=40))
    now, timed = 0.0, []
    for each, passed_s in steps:
        now += passed_s
        timed.append((each, now))
    return me, group, timed


def after(round_: PairRound, kind: str, args: tuple[Any, ...], now: float) -> list[object]:
    """The results of an event in order: (peer, attempt) of a call, or a word from above."""
    was_complete, had_ended = round_.complete, round_.ended
    match kind, args:
        case "view", (seen,):
            round_.view = seen
        case "came", (peer,):
            round_.came(peer, now)
        case "heard", (peer,):
            round_.heard_of(peer, now)
        case "complete", (peer,):
            part = TheirPart(wire.Incoming(0, 0), checked=True)
            round_.partners[peer].parts = dict.fromkeys(PARTS, part)
            round_.came(peer, now)
        case "prepared", (peer,):
            round_.partners[peer].prepared = True
            round_.came(peer, now)
        case "lost", (peer, attempt, reason):
            round_.lost(peer, attempt, reason, now)
        case "declines", (peer, reason):
            round_.declines(peer, reason)
    calls = [(peer, round_.partners[peer].attempt) for peer in round_.decide(now)]
    if had_ended:
        return [*calls]
    prepares = [PREPARED] if round_.complete and not was_complete else []
    ends = [SUCCEEDED] * round_.succeeded + [FAILED] * bool(round_.failed)
    return [*prepares, *calls, *ends]


def played(course: Course) -> list[tuple[str, tuple[Any, ...], list[object]]]:
    """Plays events, and the end of all patience; returns what came of each."""
    me, group, timed = course
    round_ = PairRound(me, group, (0, 0), {}, 0.0, view(group), CONFIG)
    round_.begin(0.0, payload_bytes=0)
    found = []
    for (kind, *args), now in [*timed, (("tick",), max(LIMIT, timed[-1][1] if timed else 0.0))]:
        found.append((kind, tuple(args), after(round_, kind, tuple(args), now)))
    return found


@steady
@given(courses())
def test_a_round_ends_once_and_succeeds_only_with_all_values_and_the_word_of_all(course):
    me, group, _ = course
    came = played(course)
    outcomes = [each for *_, found in came for each in found]
    ends = [each for each in outcomes if each in (SUCCEEDED, FAILED)]
    assert len(ends) == 1
    assert outcomes[-1] == ends[0]  # it says nothing more
    assert outcomes.count(PREPARED) <= 1
    received, said = {me}, {me}
    for kind, args, found in came:
        if kind in ("complete", "prepared"):
            (received if kind == "complete" else said).add(args[0])
        if PREPARED in found:
            assert received == {*group}
        if SUCCEEDED in found:
            assert received == said == {*group}


@steady
@given(courses())
def test_a_stream_is_opened_again_only_after_it_broke_and_counts_up(course):
    attempts: dict[str, int] = {}
    running: set[str] = set()
    for kind, args, found in played(course):
        if kind == "lost" and args[1] in (0, attempts.get(args[0])):
            running.discard(args[0])
        for call in (each for each in found if isinstance(each, tuple)):
            peer, attempt = call
            assert peer not in running
            assert attempt == attempts.get(peer, 0) + 1
            attempts[peer] = attempt
            running.add(peer)
