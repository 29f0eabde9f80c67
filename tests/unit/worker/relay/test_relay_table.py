"""The load that a relay takes on: places, dials, bytes and their rate."""

import pytest

from murmuration.worker.relay.service import RelayTable
from murmuration.worker.transport import Refused


def table(**limits: float) -> RelayTable:
    made = RelayTable(**limits)  # type: ignore[arg-type]  # ints are floats too
    made.reserve("r", 0.0, relayed=False)
    return made


def test_it_joins_a_dial_with_the_peer_that_has_reserved_and_no_other():
    relay = table()
    number = relay.dial("x", "r", known=True)
    for wrong, by in ((number, "x"), (number + 1, "r")):
        with pytest.raises(Refused, match="nobody dials it"):
            relay.accept(wrong, by)
    relay.accept(number, "r")
    assert relay.tunnels == 1
    with pytest.raises(Refused, match="nobody dials it"):
        relay.accept(number, "r")
    relay.end(number)
    assert relay.tunnels == 0


def test_it_leads_nowhere_but_to_peers_that_have_a_place_and_these_are_limited():
    relay = table(places=2)
    with pytest.raises(Refused, match="not reached through it"):
        relay.dial("x", "192.0.2.1:22", known=True)
    with pytest.raises(Refused, match="between members only"):
        relay.dial("stranger", "r", known=False)
    relay.release("r")
    with pytest.raises(Refused, match="not reached through it"):
        relay.dial("x", "r", known=True)
    relay.reserve("r", 0.0, relayed=False)
    relay.reserve("s", 0.0, relayed=False)
    relay.reserve("r", 1.0, relayed=False)
    with pytest.raises(Refused, match="2 peers already"):
        relay.reserve("t", 1.0, relayed=False)
    with pytest.raises(Refused, match="itself reached"):
        table().reserve("s", 0.0, relayed=True)
    with pytest.raises(Refused, match="--relay-mbps 0"):
        RelayTable(0).reserve("r", 0.0, relayed=False)


def test_dials_that_nobody_accepts_are_limited():
    relay = table()
    numbers = [relay.dial(f"x{n % 4}", "r", known=True) for n in range(16)]
    for sender in ("x0", "y"):
        with pytest.raises(Refused, match="16 dials wait"):
            relay.dial(sender, "r", known=True)
    relay.end(numbers[0])
    relay.dial("y", "r", known=True)
    relay.end(numbers[1])
    with pytest.raises(Refused, match="15 dials wait"):
        relay.dial("x3", "r", known=True)


def test_one_that_dials_again_and_again_leaves_room_for_others():
    """The other end takes 64, and would name this relay for more."""
    relay = table()
    for _ in range(8):
        relay.accept(relay.dial("x", "r", known=True), "r")
    with pytest.raises(Refused, match="8 tunnels lead from one peer"):
        relay.dial("x", "r", known=True)
    relay.dial("y", "r", known=True)


def test_bytes_are_counted_for_the_peer_and_wait_for_the_rate():
    relay = table(rate_mbps=8.0)  # a megabyte a second
    number = relay.dial("x", "r", known=True)
    relay.accept(number, "r")
    assert relay.carry(number, "x", 250_000, 10.0) == 0.0  # at once, after a pause
    assert relay.carry(number, "x", 500_000, 10.0) == pytest.approx(0.5)
    assert relay.carry(number, "x", 500_000, 10.5) == pytest.approx(0.5)
    assert relay.carried_bytes == {"r": 1_250_000}


def test_one_that_sends_by_many_tunnels_has_one_share():
    relay = table(rate_mbps=8.0)
    honest = relay.dial("honest", "r", known=True)
    tunnels = [relay.dial(f"x{n % 4}", "r", known=True) for n in range(15)]
    now, free_at, sent = 0.0, dict.fromkeys((honest, *tunnels), 0.0), 0
    while now < 20.0:  # each sends as soon as it may
        now = min(free_at.values())
        for number in [each for each, at in free_at.items() if at <= now]:
            sender = "honest" if number == honest else "greedy"
            free_at[number] = now + relay.carry(number, sender, 20_000, now)
            sent += 20_000 if number == honest else 0
    assert 0.45 <= sent / 20 / 1e6 <= 0.6


def test_a_peer_that_does_not_become_a_member_loses_its_place():
    relay = table()
    assert relay.strangers(9.0, set()) == []  # it may still join
    assert relay.strangers(11.0, {"r"}) == []
    assert relay.strangers(11.0, set()) == ["r"]
