"""The messages of one peer to another carry only news; and some addresses are of no use."""

from dataclasses import replace
from itertools import permutations

import pytest

from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker.membership import Digest, Health, Member, newest
from murmuration.worker.membership.dissemination import Dissemination, Said, with_progress
from murmuration.worker.membership.first_contact import undialable

OLD, NEW = (Digest(1, 2, 11),), (Digest(2, 2, 22),)


class Peer:
    """A peer's members, merged as membership merges them, and its `Dissemination`."""

    def __init__(self, name: str, *others: str) -> None:
        self.name = name
        self.known = {peer: member(peer) for peer in (name, *others)}
        self.deltas, self.now = Dissemination(name, full_s=1e9), 0.0

    @property
    def members(self) -> tuple[Member, ...]:
        return tuple(self.known[peer] for peer in sorted(self.known))

    def change(self, peer: str, **changes: object) -> None:
        self.known[peer] = replace(self.known[peer], **changes)

    def train(self, digests: tuple[Digest, ...] = OLD) -> None:
        me = self.known[self.name]
        self.change(self.name, digests=digests, step=me.step + 1, heartbeat=me.heartbeat + 1)

    def ask(self, other: "Peer") -> Said:
        return self.deltas.request(other.name, self.members, self.now)

    def hear(self, other: "Peer", said: Said) -> None:
        for heard in with_progress(said, other.name, self.members):
            known = self.known.get(heard.peer)
            self.known[heard.peer] = newest(known, heard) if known else heard
        self.deltas.heard(other.name, said, self.members)

    def reply(self, other: "Peer", said: Said) -> Said:
        self.hear(other, said)
        return self.deltas.say(other.name, self.members, full=said[1].full)


def member(peer: str) -> Member:
    return Member(peer, f"at-{peer}", start_ms=1, digests=OLD)


def exchange(asking: Peer, asked: Peer) -> tuple[Said, Said]:
    request = asking.ask(asked)
    answer = asked.reply(asking, request)
    asking.hear(asked, answer)
    return request, answer


def told(said: Said) -> list[str]:
    return sorted(member.peer for member in said[0])


def acquainted(*names: str) -> list[Peer]:
    """Who know all of each other, and that the others do."""
    peers = [Peer(name, *(n for n in names if n != name)) for name in names]
    for one, other in [*permutations(peers, 2)] * 4:
        exchange(one, other)
    return peers


def test_progress_never_overtakes_the_card_that_it_belongs_to():
    """Two requests at once: the second arrives first, and must not make the first look old."""
    a, b = acquainted("a", "b")
    a.train(NEW)
    first, second = a.ask(b), a.ask(b)
    assert (told(first), told(second)) == (["a"], [])
    assert not second[1].HasField("progress")
    b.reply(a, second)
    b.reply(a, first)
    assert b.known["a"].digests == NEW


def test_progress_of_another_life_is_passed_over():
    members = (replace(member("a"), start_ms=5),)
    far = pb.GossipMessage(progress=pb.MemberProgress(start_ms=1, heartbeat=99, step=99))
    for sender in ("a", "stranger"):
        assert with_progress(((), far), sender, members) == ()


def test_in_a_large_swarm_a_rumour_cools_and_its_subject_tells_everyone():
    names = [f"w{i:02}" for i in range(30)]
    me, *others = (Peer(name, *(n for n in names if n != name)) for name in names)
    for other in others * 2:
        exchange(me, other)

    def hear_of(peer: str, others: list[Peer]) -> int:
        return sum(peer in told(exchange(me, other)[0]) for other in others)

    me.change("w01", digests=NEW, heartbeat=9)
    assert hear_of("w01", others[1:]) == 4
    me.change("w01", health=Health.DEAD)
    assert hear_of("w01", others[1:]) == 12
    me.train(NEW)
    assert hear_of("w00", others) == 29


def test_a_message_holds_a_part_at_most_and_the_parts_add_up():
    names = [f"{'x' * 200}{i:04}" for i in range(300)]
    a = Peer(names[0], *names[1:])
    heard: set[str] = set()
    for _ in range(5):
        said = a.deltas.request(names[1], a.members, 0.0)
        a.deltas.failed(names[1])
        assert said[0][0].peer == names[0]
        assert 50 < len(said[0]) < 150
        heard |= set(told(said))
    assert heard == set(names)


def test_no_account_is_kept_of_strangers():
    a = Peer("a", "b")
    said = a.deltas.request("stranger", a.members, 0.0)
    assert (told(said), said[1].number, said[1].acknowledged) == (["a", "b"], 0, 0)
    a.deltas.heard("stranger", ((), pb.GossipMessage(number=9, reset=True)), a.members)
    a.deltas.failed("stranger")
    assert a.deltas.say("stranger", a.members, full=False)[1].acknowledged == 0


def test_what_a_peer_never_acknowledges_is_not_kept_for_ever():
    a = Peer("a", "b")
    said = [a.deltas.say("b", a.members, full=True)[1] for _ in range(50)]
    assert [each.number for each in said if each.reset] == [1, 33]  # counted on nothing any more


def test_a_member_that_gave_way_is_forgotten_with_what_is_under_way_of_it():
    a, b = acquainted("a", "b", "ghost")[:2]
    a.change("ghost", health=Health.DEAD)
    request = a.ask(b)
    assert "ghost" in told(request)
    del a.known["ghost"]
    a.hear(b, b.reply(a, request))
    assert told(a.ask(b)) == []
    a.known["ghost"] = member("ghost")
    assert told(a.ask(b)) == ["ghost"]


@pytest.mark.parametrize(
    ("theirs", "mine", "says"),
    [
        ("127.0.0.1:1", "127.0.0.1:2", None),
        ("192.0.2.1:1", "192.0.2.2:2", None),
        ("w1.example:1", "192.0.2.2:2", None),
        ("localhost:1", "127.0.0.1:2", None),
        ("0.0.0.0:7700", "192.0.2.2:2", "nobody can dial 0.0.0.0:7700"),
        ("[::]:7700", "127.0.0.1:2", "nobody can dial"),
        ("192.0.2.1:1,10.0.0.5:1", "192.0.2.2:2,10.0.0.6:2", None),
        ("192.0.2.1:1,127.0.0.1:1", "192.0.2.2:2", "from its own machine only"),
        ("w3@192.0.2.1:1;127.0.0.1:1", "192.0.2.2:2", "from its own machine only"),
        ("127.0.0.1:1", "192.0.2.2:2", "from its own machine only"),
        ("192.0.2.1:1", "127.0.0.1:2", "start the peer at 127.0.0.1:2 with"),
    ],
)
def test_loopback_only_among_peers_on_loopback(theirs, mine, says):
    refusal = undialable(theirs, mine)
    assert refusal is None if says is None else refusal and says in refusal
