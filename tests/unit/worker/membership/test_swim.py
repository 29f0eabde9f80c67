"""One peer's membership, event by event: whom it probes, what it says of itself, who comes.

What failed probes lead to is in `test_suspicion`.
"""

import itertools
from typing import Any

import pytest

from murmuration.worker.membership import (
    Digest,
    Health,
    Membership,
    MembershipConfig,
    Phase,
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
    suspect,
    tick_until,
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


def test_a_peer_is_not_probed_again_before_the_probe_has_ended() -> None:
    membership = machine("w1")
    assert probes(membership.tick(0.0)) == ["w1"]
    for tick in range(1, 20):
        assert probes(membership.tick(tick / 10)) == []
    membership.probed("w1", 2.0, answered=True)
    assert probes(membership.tick(2.1)) == ["w1"]


def test_who_is_gone_is_tried_now_and_then() -> None:
    """Both the dead and those who left: either may have been started again."""
    membership = machine()
    end(membership, "w1", Health.LEFT)
    end(membership, "w2", Health.DEAD)
    tried = []
    for tick in range(200):
        for peer in probes(membership.tick(tick / 10)):
            tried.append((peer, tick / 10))
            membership.probed(peer, tick / 10, answered=False)
    assert {peer for peer, _ in tried} == {"w1", "w2"}
    assert [at for _, at in tried] == [0.0, 5.0, 10.0, 15.0]
    assert health(membership, "w1") is Health.LEFT
    assert health(membership, "w2") is Health.DEAD


def test_who_goes_while_their_turn_is_still_to_come_is_passed_over() -> None:
    membership = machine("w1", "w2", "w3", "w4")
    (first,) = probes(membership.tick(0.0))
    membership.probed(first, 0.0, answered=True)
    rest = {"w1", "w2", "w3", "w4"} - {first}
    for peer in rest:
        membership.hear((member(peer, health=Health.LEFT),), peer, 0.1)
    for tick in range(2, 30):
        for peer in probes(membership.tick(tick / 10)):
            assert peer == first
            membership.probed(peer, tick / 10, answered=True)


def test_doubt_probes_at_once_and_only_whom_it_may_concern() -> None:
    membership = machine("w1")
    assert probes(membership.suspect("w1")) == ["w1"]
    assert probes(membership.suspect("w1")) == []
    assert membership.suspect("stranger") == []
    end(membership, "w2", Health.DEAD)
    assert membership.suspect("w2") == []


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


def test_rumours_of_another_life_are_passed_over() -> None:
    membership = machine("w1")
    for rumour in (
        member("me", epoch=0, incarnation=1, health=Health.DEAD),
        member("me", incarnation=7),
    ):
        membership.hear((rumour,), None, 0.0)
    assert membership.me == member("me")


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


def test_a_heartbeat_of_somebody_elses_is_passed() -> None:
    membership = machine("w1")
    membership.hear((member("me", heartbeat=900, step=7),), None, 0.0)
    assert membership.me == member("me", heartbeat=901)


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


def test_an_update_is_newer_than_all_before() -> None:
    membership = machine("w1")
    digests = (Digest(3, 2, 99),)
    membership.update(phase=Phase.TRAINING, step=30, digests=digests)
    assert membership.changed
    me = membership.me
    assert (me.phase, me.step, me.digests, me.heartbeat) == (Phase.TRAINING, 30, digests, 1)
    assert membership.update(phase=Phase.TRAINING, step=31, digests=digests) == []
    assert not membership.changed
    assert membership.me.heartbeat == 2


def test_leaving_tells_everyone_who_lives_and_cannot_be_talked_out_of() -> None:
    membership = machine("w1", "w2")
    end(membership, "w3", Health.DEAD)
    actions = membership.leave()
    assert sorted(probes(actions)) == ["w1", "w2"]
    assert membership.changed
    membership.hear((member("me", health=Health.DEAD),), None, 0.0)
    assert membership.me.health is Health.LEFT
    assert membership.me.incarnation == 0


# --------------------------------------------------------------------------- coming and going


def test_who_left_while_suspected_left() -> None:
    membership = machine("w1", "w2", "w3")
    suspect(membership, "w1", 0.0)
    membership.hear((member("w1", health=Health.LEFT),), None, 1.0)
    tick_until(membership, 1.0, 30.0)
    assert health(membership, "w1") is Health.LEFT


@pytest.mark.parametrize("end", [Health.DEAD, Health.LEFT])
def test_a_new_life_replaces_the_old_and_old_rumours_do_not_win(end: Health) -> None:
    membership = machine("w1", "w2")
    old = member("w1", incarnation=9, heartbeat=99, health=end)
    membership.hear((old,), "w1", 0.0)
    reborn = member("w1", epoch=2, address="elsewhere")
    membership.hear((reborn,), None, 1.0)
    assert membership.changed
    assert membership.hear((old,), None, 2.0) == []
    assert not membership.changed
    assert health(membership, "w1") is Health.ALIVE
    assert membership.address("w1") == "elsewhere"


def test_the_dead_may_come_back_by_refuting() -> None:
    membership = machine("w2")
    end(membership, "w1", Health.DEAD)
    membership.hear((member("w1", incarnation=1),), None, 60.0)
    assert membership.changed
    assert health(membership, "w1") is Health.ALIVE


def test_the_view_changes_with_peers_health_and_phase_and_with_nothing_else() -> None:
    membership = machine("w1")
    membership.hear((member("w2"),), None, 0.0)
    assert membership.changed
    assert membership.hear((member("w2"),), None, 0.0) == []
    assert not membership.changed
    assert membership.hear((member("w2", heartbeat=1, step=5),), None, 0.0) == []
    assert not membership.changed
    phase = member("w2", heartbeat=2, phase=Phase.TRAINING)
    membership.hear((phase,), None, 0.0)
    assert membership.changed


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
