"""Which relays a peer has: decided without I/O, at given times."""

import itertools
from collections.abc import Sequence
from functools import partial

from murmuration.worker.relay.choice import MOST_RETRY_S, RETRY_S, TRY_S, RelayChoice


class Choice(RelayChoice):
    def __init__(self) -> None:
        self._did: list[tuple[str, object]] = []
        names = ("reserve", "release", "check", "advertise")
        super().__init__(*(partial(self._do, name) for name in names))

    def _do(self, name: str, given: object) -> None:
        self._did.append((name, given))

    @property
    def did(self) -> list[tuple[str, object]]:
        """The calls that it has made since it was looked at last."""
        did, self._did = self._did, []
        return did


def seen(
    *rtts_s: float, gone: Sequence[str] = ()
) -> tuple[dict[str, tuple[str, float | None]], Sequence[str]]:
    """Peers p0, p1, ... at a0, a1, ..."""
    there = {f"a{i}": (f"p{i}", rtt_s) for i, rtt_s in enumerate(rtts_s)}
    return {address: there[address] for address in there if address not in gone}, gone


def begun(*rtts_s: float) -> Choice:
    """p0 is its first relay, and the next fastest its second."""
    choice = Choice()
    choice.want("a0")
    choice.reserved("a0", "p0", "a0", 0.1)
    assert choice.did == [("reserve", "a0"), ("advertise", ("a0",))]
    choice.seen(*seen(*rtts_s), 0.2)
    choice.tick(0.3)
    for name, address in choice.did:
        assert name == "reserve"
        choice.reserved(str(address), f"p{str(address)[1:]}", str(address), 0.4)
    assert [name for name, _ in choice.did] in ([], ["advertise"])
    return choice


def test_nothing_is_done_as_long_as_others_dial_this_peer():
    choice = Choice()
    choice.seen(*seen(0.01, 0.02), 0.0)
    choice.tick(1000.0)
    assert choice.did == []


def test_one_that_died_is_released_though_its_stream_seems_to_live():
    choice = begun(0.01, 0.02)
    choice.seen(*seen(0.01, 0.02, gone=["a0"]), 1.0)
    assert choice.did == [("release", "a0"), ("advertise", ("a1",))]


def test_one_that_fails_is_asked_again_after_a_pause_that_doubles():
    choice, asked_at, now, held = begun(0.01), list[float](), 1.0, True
    while len(asked_at) < 5:
        if held:
            choice.lost("a0", now)
            assert choice.did == []  # nobody else is there to advertise
        choice.tick(now)
        if held := ("reserve", "a0") in choice.did:
            asked_at.append(now)
        now += 0.5
    pauses = [after - before for before, after in itertools.pairwise(asked_at)]
    assert pauses == sorted(pauses)
    assert pauses[-1] >= 8 * RETRY_S
    for _ in range(2000):  # a day
        choice.lost("a0", now)
        now += MOST_RETRY_S
        choice.tick(now)
        assert choice.did[0] == ("reserve", "a0")


def test_one_that_leads_nowhere_several_times_in_a_row_is_replaced_and_left_alone():
    choice, now = begun(0.01, 0.02, 0.03), 0.0

    def tried(**leads_here: bool) -> list[tuple[str, object]]:
        nonlocal now
        now += TRY_S + 1
        choice.tick(now)
        assert {address for name, address in choice.did if name == "check"} == set(leads_here)
        for each in leads_here:
            choice.tried(each, now, leads_here=leads_here[each])
        return choice.did

    assert tried(a0=False, a1=True) == []
    assert tried(a0=False, a1=True) == []
    assert tried(a0=True, a1=True) == []  # it had been busy
    assert [tried(a0=False, a1=True) for _ in range(2)] == [[], []]
    replaced = [("release", "a0"), ("advertise", ("a1",)), ("reserve", "a2")]
    assert tried(a0=False, a1=True) == replaced
    choice.lost("a2", now)
    choice.tick(now + MOST_RETRY_S - 1)
    assert ("reserve", "a0") not in choice.did
    choice.tried("a0", now, leads_here=False)
    assert choice.did == []  # it is none any more


def test_a_relay_has_no_right_to_the_name_and_address_of_another():
    choice = begun(0.01, 0.02, 0.03)  # p0 and p1 are relays, p2 may be one
    assert not choice.is_of_another("a2", "a2", "p2")
    assert not choice.is_of_another("b2", "a2", "p2"), "it has another address by now"
    assert not choice.is_of_another("a2", "alias", "p2")
    for name, address, peer in (("a0", "a2", "p2"), ("a0", "a2", "p0"), ("a0", "alias", "p0")):
        assert choice.is_of_another(name, address, peer)
    assert choice.is_of_another("a2", "alias", "p3")
