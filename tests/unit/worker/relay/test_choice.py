"""Which relays a peer has: decided without I/O, at given times."""

import itertools
from collections.abc import Sequence

from murmuration.worker.relay.choice import (
    MOST_RETRY_S,
    RETRY_S,
    TRY_S,
    Action,
    Advertise,
    RelayChoice,
    Release,
    Reserve,
    Try,
)


def seen(
    *rtts_s: float, gone: Sequence[str] = ()
) -> tuple[dict[str, tuple[str, float | None]], Sequence[str]]:
    """Peers p0, p1, ... at a0, a1, ..."""
    there = {f"a{i}": (f"p{i}", rtt_s) for i, rtt_s in enumerate(rtts_s)}
    return {address: there[address] for address in there if address not in gone}, gone


def begun(*rtts_s: float) -> RelayChoice:
    """p0 is its first relay, and the next fastest its second."""
    choice = RelayChoice()
    assert choice.want("a0") == [Reserve("a0")]
    assert choice.reserved("a0", "p0", "a0", 0.1) == [Advertise(("a0",))]
    choice.seen(*seen(*rtts_s), 0.2)
    for action in choice.tick(0.3):
        assert isinstance(action, Reserve)
        choice.reserved(action.address, f"p{action.address[1:]}", action.address, 0.4)
    return choice


def test_nothing_is_done_as_long_as_others_dial_this_peer():
    choice = RelayChoice()
    assert choice.seen(*seen(0.01, 0.02), 0.0) == []
    assert choice.tick(1000.0) == []


def test_one_that_died_is_released_though_its_stream_seems_to_live():
    actions = begun(0.01, 0.02).seen(*seen(0.01, 0.02, gone=["a0"]), 1.0)
    assert actions == [Release("a0"), Advertise(("a1",))]


def test_one_that_fails_is_asked_again_after_a_pause_that_doubles():
    choice, asked_at, now, held = begun(0.01), list[float](), 1.0, True
    while len(asked_at) < 5:
        if held:
            assert choice.lost("a0", now) == []  # nobody else is there to advertise
        if held := Reserve("a0") in choice.tick(now):
            asked_at.append(now)
        now += 0.5
    pauses = [after - before for before, after in itertools.pairwise(asked_at)]
    assert pauses == sorted(pauses)
    assert pauses[-1] >= 8 * RETRY_S
    for _ in range(2000):  # a day
        choice.lost("a0", now)
        now += MOST_RETRY_S
        assert choice.tick(now)[0] == Reserve("a0")


def test_one_that_leads_nowhere_several_times_in_a_row_is_replaced_and_left_alone():
    choice = begun(0.01, 0.02, 0.03)
    now = 0.0

    def tried(**leads_here: bool) -> list[Action]:
        nonlocal now
        now += TRY_S + 1
        tries = [each for each in choice.tick(now) if isinstance(each, Try)]
        assert {each.address for each in tries} == set(leads_here)
        actions = [choice.tried(each, now, leads_here=leads_here[each]) for each in leads_here]
        return [action for each in actions for action in each]

    assert tried(a0=False, a1=True) == []
    assert tried(a0=False, a1=True) == []
    assert tried(a0=True, a1=True) == []  # it had been busy
    assert [tried(a0=False, a1=True) for _ in range(2)] == [[], []]
    assert tried(a0=False, a1=True) == [Release("a0"), Advertise(("a1",)), Reserve("a2")]
    choice.lost("a2", now)
    assert Reserve("a0") not in choice.tick(now + MOST_RETRY_S - 1)
    assert choice.tried("a0", now, leads_here=False) == []  # it is none any more


def test_a_relay_has_no_right_to_the_name_and_address_of_another():
    choice = begun(0.01, 0.02, 0.03)  # p0 and p1 are relays, p2 may be one
    assert not choice.is_of_another("a2", "a2", "p2")
    assert not choice.is_of_another("b2", "a2", "p2"), "it has another address by now"
    assert not choice.is_of_another("a2", "alias", "p2")
    for name, address, peer in (("a0", "a2", "p2"), ("a0", "a2", "p0"), ("a0", "alias", "p0")):
        assert choice.is_of_another(name, address, peer)
    assert choice.is_of_another("a2", "alias", "p3")
