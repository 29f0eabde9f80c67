"""One peer's membership, event by event: whom it probes, what it says of itself, who comes.

What failed probes lead to is in `test_suspicion`.
"""

import itertools
from typing import Any

import pytest

from murmuration.worker.membership import (
    Health,
    Membership,
    MembershipConfig,
    newest,
)
from murmuration.worker.membership.swim import MAX_MEMBERS
from tests.unit.worker.membership.machines import (
    CONFIG,
    asked,
    health,
    machine,
    member,
    probes,
)

# ------------------------------------------------------------------------------------- probing


@pytest.mark.parametrize("others", range(1, 12))
def test_everybody_is_probed_about_once_per_probe_period(others: int) -> None:
    membership = machine(*(f"w{i}" for i in range(others)))
    probed: dict[str, list[float]] = {f"w{i}": [0.0] for i in range(others)}
    for tick in range(400):
        now = tick * 0.05
        for peer in probes(membership.tick(now)):
            probed[peer].append(now)
            membership.probed(peer, now, answered=True)
    for times in probed.values():
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        assert max(gaps) <= 2 * CONFIG.probe_s + CONFIG.gossip_s


def end(membership: Membership, peer: str, health_: Health) -> None:
    """It is heard of for the first time when it is gone already."""
    membership.hear((member(peer, health=health_),), None, 0.0)
    assert health(membership, peer) is health_


# ------------------------------------------------------------------------------- about oneself


@pytest.mark.parametrize("rumour", [Health.SUSPECT, Health.DEAD])
def test_a_rumour_of_ones_own_end_is_refuted(rumour: Health) -> None:
    membership = machine("w1")
    membership.hear((member("me", incarnation=5, health=rumour),), None, 0.0)
    assert membership.me.health is Health.ALIVE
    assert membership.me.incarnation == 6
    assert membership.me.heartbeat == 1
    membership.hear((member("me", incarnation=5, health=rumour),), None, 0.0)
    assert membership.me.incarnation == 6, "refuted already"


@pytest.mark.parametrize(
    "words",
    [
        {"health": Health.LEFT},
        {"incarnation": 2**31, "health": Health.DEAD},
        {"incarnation": 2**31},
        {"heartbeat": 2**53},
    ],
)
def test_what_cannot_be_taken_back_is_outlived(words: dict[str, Any]) -> None:
    """Whoever has believed it believes a later epoch again."""
    membership = machine("w1")
    heard = member("me", **words)
    membership.hear((heard,), None, 0.0)
    assert membership.me == member("me", epoch=2)
    assert newest(heard, membership.me) == membership.me
    membership.hear((heard,), None, 0.0)
    assert membership.me.epoch == 2, "outlived already"


def test_of_a_flood_of_ghosts_only_so_many_are_kept() -> None:
    membership = machine("w1")
    ghosts = tuple(member(f"ghost-{n:05}") for n in range(MAX_MEMBERS + 100))
    membership.hear(ghosts, None, 0.0)
    assert len(membership.members) == MAX_MEMBERS
    membership.hear((member("w1", heartbeat=5),), None, 0.0)
    assert next(each for each in membership.members if each.peer == "w1").heartbeat == 5


def test_ghosts_that_came_first_give_way_once_they_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("murmuration.worker.membership.swim.MAX_MEMBERS", 4)
    membership = machine("w1")
    membership.probed("w1", 0.0, answered=True)
    membership.hear((member("ghost-1"),), None, 0.0)
    end(membership, "ghost-2", Health.DEAD)
    membership.expel("w1")  # it has ended, and was there
    membership.hear((member("w2"),), None, 2.0)
    assert membership.changed
    assert [each.peer for each in membership.members] == ["ghost-1", "me", "w1", "w2"]
    membership.hear((member("w3"),), None, 3.0)  # nobody else has ended
    assert [each.peer for each in membership.members] == ["ghost-1", "me", "w1", "w2"]


# --------------------------------------------------------------------------- coming and going


# ------------------------------------------------------------------------------------- settings


def test_the_time_to_refute_grows_with_the_logarithm_of_the_swarm() -> None:
    assert CONFIG.suspicion_s(0) == CONFIG.suspicion_s(10) == 4.0
    assert CONFIG.suspicion_s(1000) == pytest.approx(12.0)
    assert CONFIG.detection_s(4) == 1.0 + 2 * 1.0 + 4.0


@pytest.mark.parametrize(
    "field", ["gossip_s", "probe_s", "probe_timeout_s", "suspicion_factor", "reconnect_s"]
)
def test_periods_must_be_above_zero(field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field} is 0; it must be above 0$"):
        MembershipConfig(**{field: 0})


def test_the_number_of_indirect_probes_may_be_zero_and_not_less() -> None:
    membership = machine("w1", "w2", config=MembershipConfig(indirect_probes=0))
    (again,) = asked(membership.probed("w1", 0.0, answered=False))
    assert again.via == "at-me"
    with pytest.raises(ValueError, match="indirect_probes is -1"):
        MembershipConfig(indirect_probes=-1)
