"""A peer's figures of its last rounds, and the same as they travel."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from murmuration.worker.exchange.measured import Arrivals
from murmuration.worker.status.locator import OwnFigures, from_document, to_document
from tests.support.fake_clock import FakeClock


def after_rounds(count: int) -> OwnFigures:
    """Of rounds of 4 s, for half a second of which a megabit of w1's came in."""
    clock = FakeClock()
    arrivals = Arrivals(clock)
    own = OwnFigures("w0", arrivals, clock)
    for number in range(count):
        with arrivals.payload() as payload:
            payload.begins("w1")
            clock.now_s += 0.5
            payload.came(125_000)
        clock.now_s = 4.0 * (number + 1)
        own.round_ended()
        own.applied({"stall_s": 1.0, "steps": 20, "step_s": 0.1 if number else 9.0})
    return own


def test_medians_of_the_last_rounds() -> None:
    own = after_rounds(6)
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
def test_whatever_another_peer_says_can_be_read(document: dict[str, object]) -> None:
    found = from_document("w9", document)
    assert found.peer == "w9"
    assert to_document(found)["rounds"] == found.rounds
