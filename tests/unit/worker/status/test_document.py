"""A peer's words about its rounds: totals, the latest, those on their way, their figures."""

import pytest
from hypothesis import given, settings, strategies as st

from murmuration.protos.events import new_event
from murmuration.worker.exchange.measured import Arrivals
from murmuration.worker.status.document import RoundLog
from murmuration.worker.status.locator import OwnFigures, from_document, to_document
from tests.support.fake_clock import FakeClock


def test_a_round_from_its_start_to_the_step_after_it():
    clock = FakeClock()
    rounds, clock.now_s = RoundLog(clock), 100.0
    rounds.began(0, 3)
    clock.now_s = 101.0
    rounds.told(new_event("progress", state="waiting"))
    clock.now_s = 102.0
    assert rounds.waiting_s() == 1.0
    (under_way,) = rounds.recent()
    assert (under_way["began_s_ago"], under_way["ended_s_ago"]) == (2.0, None)

    rounds.completed(0, 3, exchange_s=2.0, waited_for="w4")
    rounds.told(new_event("round", fragment=0, round=3, stall_s=1.0, waited_for="w4"))
    clock.now_s = 104.0
    (over,) = rounds.recent()
    assert over == {
        "fragment": 0, "round": 3, "began_s_ago": 4.0, "ended_s_ago": 2.0, "failed": False,
        "waited_for": "w4", "stall_s": 1.0, "resumed_s_ago": 2.0,
    }  # fmt: skip
    assert rounds.waiting_s() is None
    assert (rounds.done, rounds.exchange_s) == (1, 2.0)


def test_one_round_of_a_fragment_is_on_its_way_and_the_latest_are_kept():
    rounds = RoundLog(FakeClock())
    for number in range(200):
        rounds.began(0, number)
        rounds.completed(0, number, exchange_s=0.1, waited_for="")
    rounds.began(0, 200)
    rounds.began(0, 201)

    assert [each["round"] for each in rounds.recent()] == [*range(200 - 48, 200), 201]
    assert rounds.done == 200


def test_medians_of_the_last_rounds():
    """The rounds take 4 s. In half a second of each a megabit of w1's came in."""
    clock = FakeClock()
    arrivals = Arrivals(clock)
    own = OwnFigures("w0", arrivals, clock)
    for number in range(6):
        with arrivals.payload() as payload:
            payload.begins("w1")
            clock.now_s += 0.5
            payload.came(125_000)
        clock.now_s = 4.0 * (number + 1)
        own.round_ended()
        own.applied({"stall_s": 1.0, "steps": 20, "step_s": 0.1 if number else 9.0})
    own.saved(0.5)
    own.saved(2.5)
    found = own.figures()
    assert (found.peer, found.rounds, found.saves) == ("w0", 6, 2)
    assert (found.round_s, found.stall_s, found.step_s, found.steps) == (4.0, 1.0, 0.1, 20)
    assert found.save_s == 1.5
    assert found.received == {"w1": (pytest.approx(2.0), pytest.approx(0.5))}
    assert from_document("w0", to_document(found)) == found


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
KEYS = st.sampled_from(["rounds", "round_s", "step_s", "steps", "saves", "save_s", "received"])


@settings(max_examples=25)
@given(st.dictionaries(KEYS, anything))
def test_whatever_another_peer_says_can_be_read(document):
    found = from_document("w9", document)
    assert found.peer == "w9"
    assert to_document(found)["rounds"] == found.rounds
