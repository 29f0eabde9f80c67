"""One peer's membership, event by event: whom it probes, what it says of itself, and what speaks
against others: their word, lost probes, and rounds that waited in vain."""

import itertools
import random
from collections.abc import Collection, Sequence
from dataclasses import replace

import pytest

from murmuration.worker.membership import Digest, Health, Member, newest
from murmuration.worker.membership.evidence import IdlePeers, Reachability, Waits
from murmuration.worker.membership.swim import MAX_MEMBERS, Membership, MembershipConfig, Probe

CONFIG = MembershipConfig(
    gossip_s=0.25, probe_s=1.0, probe_timeout_s=1.0, suspicion_factor=4.0, reconnect_s=5.0
)
SUSPICION_S = CONFIG.suspicion_s(4)


def member(peer: str, **changes: object) -> Member:
    return replace(Member(peer, f"at-{peer}", start_ms=1), **changes)


def machine(*others: str, config: MembershipConfig = CONFIG) -> Membership:
    """`me`, who knows `others` and has not ticked yet."""
    membership = Membership(member("me"), config, random.Random(0))
    membership.hear(tuple(member(other) for other in others), None, 0.0)
    assert membership.view_changed()
    return membership


def health(membership: Membership, peer: str) -> Health:
    return next(each.health for each in membership.members if each.peer == peer)


def probes(actions: Sequence[Probe]) -> list[str]:
    return [action.peer for action in actions if not action.via]


def asked(actions: Sequence[Probe]) -> list[Probe]:
    return [action for action in actions if action.via]


def suspect(membership: Membership, peer: str, now: float) -> None:
    """Probes of `peer` fail, the indirect ones too."""
    for _ in asked(membership.probed(peer, now, answered=False)):
        membership.probed_for(peer, now, alive=False)
    assert health(membership, peer) is Health.SUSPECT


def tick_until(
    membership: Membership, start: float, stop: float, silent: Collection[str] = ()
) -> None:
    """Ticks ten times a second. The silent answer no probe, nor those who are suspected already."""
    for tenth in range(round(10 * start), round(10 * stop) + 1):
        now = tenth / 10
        for peer in probes(membership.tick(now)):
            lives = peer not in silent and health(membership, peer) is not Health.SUSPECT
            for ask in asked(membership.probed(peer, now, answered=lives)):
                membership.probed_for(ask.peer, now, alive=False)


@pytest.mark.parametrize("others", range(1, 12))
def test_everybody_is_probed_about_once_per_probe_period(others):
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


@pytest.mark.parametrize("rumour", [Health.SUSPECT, Health.DEAD])
def test_a_rumour_of_ones_own_end_is_refuted(rumour):
    membership = machine("w1")
    for _ in range(2):  # once
        membership.hear((member("me", incarnation=5, health=rumour),), None, 0.0)
        me = membership.me
        assert (me.health, me.incarnation, me.heartbeat) == (Health.ALIVE, 6, 1)


@pytest.mark.parametrize(
    "words",
    [
        {"health": Health.LEFT},
        {"incarnation": 2**31, "health": Health.DEAD},
        {"incarnation": 2**31},
        {"heartbeat": 2**53},
    ],
)
def test_what_cannot_be_taken_back_is_outlived(words):
    """Whoever has believed it believes a later start again."""
    membership, heard = machine("w1"), member("me", **words)
    for _ in range(2):  # once
        membership.hear((heard,), None, 0.0)
        assert membership.me == member("me", start_ms=2)
        assert newest(heard, membership.me) == membership.me


def test_of_a_flood_of_ghosts_only_so_many_are_kept():
    membership = machine("w1")
    membership.hear(tuple(member(f"ghost-{n:05}") for n in range(MAX_MEMBERS + 100)), None, 0.0)
    assert len(membership.members) == MAX_MEMBERS
    membership.hear((member("w1", heartbeat=5),), None, 0.0)
    assert next(each for each in membership.members if each.peer == "w1").heartbeat == 5


def test_ghosts_that_came_first_give_way_once_they_have_ended(monkeypatch):
    monkeypatch.setattr("murmuration.worker.membership.swim.MAX_MEMBERS", 4)
    membership = machine("w1")
    membership.probed("w1", 0.0, answered=True)
    membership.hear((member("ghost-1"),), None, 0.0)
    membership.hear((member("ghost-2", health=Health.DEAD),), None, 0.0)  # gone already
    membership.expel("w1")  # it has ended, and was there
    assert membership.view_changed()
    there = ["ghost-1", "me", "w1", "w2"], ["ghost-1", "me", "w2", "w3"]
    for now, expected in (
        (2.0, there[0]),
        (3.0, there[1]),
        (4.0, there[1]),
    ):  # nobody else has ended
        membership.hear((member(f"w{now:.0f}"),), None, now)
        assert membership.view_changed() == (now < 4)
        assert [each.peer for each in membership.members] == expected


def test_the_time_to_refute_grows_with_the_logarithm_of_the_swarm():
    assert CONFIG.suspicion_s(0) == CONFIG.suspicion_s(10) == 4.0
    assert CONFIG.suspicion_s(1000) == pytest.approx(12.0)
    assert CONFIG.detection_s(4) == 1.0 + 2 * 1.0 + 4.0


def test_periods_must_be_above_zero():
    for name in ("gossip_s", "probe_s", "probe_timeout_s", "suspicion_factor", "reconnect_s"):
        with pytest.raises(ValueError, match=f"^{name} is 0; it must be above 0$"):
            MembershipConfig(**{name: 0})


def test_the_number_of_indirect_probes_may_be_zero_and_not_less():
    membership = machine("w1", "w2", config=MembershipConfig(indirect_probes=0))
    (again,) = asked(membership.probed("w1", 0.0, answered=False))
    assert again.via == "at-me"
    with pytest.raises(ValueError, match="indirect_probes is -1"):
        MembershipConfig(indirect_probes=-1)


def test_a_suspicion_of_a_higher_incarnation_starts_its_time_again():
    membership = machine("w1", "w2", "w3")
    suspect(membership, "w1", 0.0)
    tick_until(membership, 0.0, 3.0)
    membership.hear((member("w1", incarnation=1, health=Health.SUSPECT),), None, 3.0)
    assert health(membership, "w1") is Health.ALIVE, "it has refuted, and that is all that is known"
    tick_until(membership, 3.1, 5.0)
    suspect(membership, "w1", 5.0)
    tick_until(membership, 5.1, 2.9 + SUSPICION_S)
    assert health(membership, "w1") is Health.SUSPECT
    tick_until(membership, 3.0 + SUSPICION_S, 3.0 + SUSPICION_S)
    assert health(membership, "w1") is Health.DEAD


def test_the_same_suspicion_heard_again_does_not():
    membership = machine("w1", "w2", "w3")
    suspect(membership, "w1", 0.0)
    for second in range(1, 4):
        membership.hear((member("w1", health=Health.SUSPECT),), None, float(second))
        tick_until(membership, second, second + 0.9)
    tick_until(membership, 4.0, SUSPICION_S)
    assert health(membership, "w1") is Health.DEAD


@pytest.mark.parametrize("word", [Health.SUSPECT, Health.DEAD, Health.LEFT])
def test_what_others_say_of_an_end_makes_this_peer_look_and_no_more(word):
    membership = machine("w1", "w2", "w3")
    assert probes(membership.hear((member("w1", health=word),), "w2", 0.0)) == ["w1"]
    assert not membership.view_changed()
    assert membership.said_against("w1") == member("w1", health=Health.SUSPECT)
    assert membership.probed("w1", 0.1, answered=True) == []
    assert membership.said_against("w1") is None
    again = membership.hear((member("w1", health=word),), "w3", 0.2)
    assert again == [], "it has only just answered"
    tick_until(membership, 0.3, 3 * SUSPICION_S)
    assert health(membership, "w1") is Health.ALIVE


def test_a_departure_that_others_tell_of_is_one_when_the_peer_is_silent():
    membership = machine("w1", "w2", "w3")
    membership.hear((member("w1", health=Health.LEFT),), "w2", 0.0)
    for _ in asked(membership.probed("w1", 1.0, answered=False)):
        membership.probed_for("w1", 2.0, alive=False)
    assert health(membership, "w1") is Health.LEFT


def test_several_that_say_the_same_shorten_the_time_of_a_suspect():
    """Down to what ten peers have; the word of one counts once, however often it comes."""
    others = [f"w{n:02}" for n in range(99)]
    for accusers, time_s in ((1, 2.0), (2, 1.5), (4, 1.0), (9, 1.0)):
        membership = machine(*others)
        suspect(membership, "w00", 0.0)
        for accuser in others[1:accusers]:
            for _ in range(3):
                membership.hear((member("w00", health=Health.SUSPECT),), accuser, 0.0)
        until = time_s * CONFIG.least_suspicion_s
        tick_until(membership, 0.1, until - 0.1, silent=["w00"])
        assert health(membership, "w00") is Health.SUSPECT, f"{accusers} accuse"
        tick_until(membership, until, until)
        assert health(membership, "w00") is Health.DEAD, f"{accusers} accuse"


def test_an_answer_to_others_that_took_long_says_nothing_of_the_link():
    """The own link is slow, to whomever it leads."""
    membership = machine("w1", "w2", "w3")
    for begun in range(0, 40, 4):
        for ask in asked(membership.probed("w2", begun, answered=False)):
            membership.probed_for(ask.peer, begun + CONFIG.probe_timeout_s + 0.1, alive=True)
    membership.view_changed()
    assert membership.me.unreachable == ()
    assert {each.health for each in membership.members} == {Health.ALIVE}


MINUTE_S = 60.0


@pytest.mark.parametrize(
    ("rounds", "fragments", "marked"),
    [
        (["d", "d"], 1, ()),
        (["d", "d", "d"], 1, ("d",)),
        (["dd", "d"], 1, ("d",)),
        (["d", *[""] * 6, "d", "d"], 1, ()),
        (["d", *[""] * 5, "d", "d"], 1, ("d",)),
        (["d", "c", "d", "c"], 1, ()),
        (["d"] * 8, 8, ()),  # one pause that many fragments meet
    ],
)
def test_three_of_eight_rounds_of_a_fragment(rounds, fragments, marked):
    idle = IdlePeers()
    for number, late in enumerate(rounds):
        idle.round_ended(number % fragments, list(late), 0.0)
    assert idle.peers == marked


@pytest.mark.parametrize(
    ("said", "late"),
    [
        ("me d 71, a d 74, b d 77", ["d"]),
        ("me d 71, me d 74, me d 77", ["d"]),
        ("me d 21, a d 48, b d 75", ["d"]),  # it skips what it comes too late for
        ("me d 71, a d 71, b d 71", []),  # one pause that keeps several waiting
        ("a d 71, b d 74, c d 77", []),  # not for this peer
        ("me d 71, a d 74, a d 77", []),  # each other's word counts once
        ("me d 71, a d 74, b d 7", []),  # long ago
        ("me a 71, b a 74, c a 77, a d 70, b d 74, c d 77", []),  # it was kept waiting itself
        ("me d 71, a d 74, b d 77, d c 70, c d 72", ["d"]),  # no excuse: c was late less often
    ],
)
def test_who_is_late_by_itself_for_partners(said, late):
    waits, digests = Waits("me"), (Digest(78, 2, 0),)
    waits.on_members({each: member(each, digests=digests) for each in ("me", *"abcd")})
    for who, peer, at in map(str.split, said.split(", ")):
        assert waits.says(who, peer, int(at))
    assert waits.often_late() == late
    assert waits.known_late("d") == ("a d" in said)


@pytest.mark.parametrize(("gone", "marked"), [("bc", ()), ("", ("a",))])
def test_words_stand_briefly_again_where_the_other_end_was_gone(gone, marked):
    idle, now = IdlePeers(), 0.0
    words = [*itertools.product("bc", (4, 8, 16, 32)), ("b", 4), ("c", 4), ("b", 8)]
    for number, (of, stands_s) in enumerate(words):
        for peer in gone if number == 8 else ():
            idle.gone(peer)
        cut = replace(member("a"), unreachable=(of,))
        idle.hear(member("a"), cut, now)
        idle.hear(cut, member("a"), now := now + stands_s)
    assert idle.peers == marked


@pytest.mark.parametrize(("taken", "given", "marked"), [("bcd", "xyz", ("a",)), ("xyz", "bcd", ())])
def test_a_full_list_leaves_out_its_last_ones_alone(taken, given, marked):
    idle, most = IdlePeers(), "efghijklmnopqrs"
    for now, (before, after) in enumerate(zip(taken, given, strict=True)):
        full, others = (replace(member("a"), unreachable=(each, *most)) for each in (before, after))
        idle.hear(member("a"), full, now)
        idle.hear(full, others, now + 0.5)
    assert idle.peers == marked


def test_a_word_stands_as_long_as_others_expect_however_briefly_this_peer_probes():
    reach = Reachability(0.5)
    for now in (0.0, 1.0, 2.0):
        reach.missed("b", 1, now)
    for now, unreachable in ((3.0, ("b",)), (6.9, ("b",)), (7.0, ())):
        reach.answered("b", now)
        assert reach.unreachable == unreachable


def test_who_was_marked_is_waited_for_once_more_and_stays_out_for_twice_as_long():
    """And says of itself for longer that it does not keep up."""
    idle, itself = IdlePeers(), IdlePeers("d")
    for each in (idle, itself):
        each.waited_for("d", now=0.0)
    idle.tick(MINUTE_S)
    assert idle.peers == ()
    idle.round_ended(0, ["d"], MINUTE_S)
    for each, minutes in ((idle, 3), (itself, 4)):
        each.tick(minutes * MINUTE_S - 1)
        assert each.peers == ("d",)
        each.tick(minutes * MINUTE_S)
        assert each.peers == ()
