"""What one peer tells another, message by message: only news, and nothing that counts on luck."""

from dataclasses import replace

from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker.membership import Digest, Health, Member, newest
from murmuration.worker.membership.dissemination import Dissemination, Said, with_progress

OLD, NEW = (Digest(1, 2, 11),), (Digest(2, 2, 22),)


class Peer:
    """A peer's members, merged as membership merges them, and its `Dissemination`."""

    def __init__(self, name: str, *others: str, full_s: float = 1e9) -> None:
        self.name = name
        self.known = {peer: member(peer) for peer in (name, *others)}
        self.deltas = Dissemination(name, full_s)
        self.now = 0.0

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
    return Member(peer, f"at-{peer}", epoch=1, digests=OLD)


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
    for _ in range(4):
        for one in peers:
            for other in peers:
                if one is not other:
                    exchange(one, other)
    return peers


def test_progress_never_overtakes_the_card_that_it_belongs_to() -> None:
    """Two requests at once: the second arrives first, and must not make the first look old."""
    a, b = acquainted("a", "b")
    a.train(NEW)
    first, second = a.ask(b), a.ask(b)
    assert (told(first), told(second)) == (["a"], [])
    assert not second[1].HasField("progress")
    b.reply(a, second)
    b.reply(a, first)
    assert b.known["a"].digests == NEW


def test_progress_of_another_life_is_passed_over() -> None:
    members = (replace(member("a"), epoch=5),)
    far = pb.GossipMessage(progress=pb.MemberProgress(epoch=1, heartbeat=99, step=99))
    for sender in ("a", "stranger"):
        assert with_progress(((), far), sender, members) == ()


def test_in_a_large_swarm_a_rumour_cools_and_its_subject_tells_everyone() -> None:
    names = [f"w{i:02}" for i in range(30)]
    peers = {name: Peer(name, *(n for n in names if n != name)) for name in names}
    me = peers["w00"]
    for name in names[1:]:
        for _ in range(2):
            exchange(me, peers[name])
    me.change("w01", digests=NEW, heartbeat=9)
    told_w01 = [name for name in names[2:] if "w01" in told(exchange(me, peers[name])[0])]
    assert len(told_w01) == 4
    me.change("w01", health=Health.DEAD)
    told_w01 = [name for name in names[2:] if "w01" in told(exchange(me, peers[name])[0])]
    assert len(told_w01) == 12
    me.train(NEW)
    assert all("w00" in told(exchange(me, peers[name])[0]) for name in names[1:])


def test_a_message_holds_a_part_at_most_and_the_parts_add_up() -> None:
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


def test_no_account_is_kept_of_strangers() -> None:
    a = Peer("a", "b")
    said = a.deltas.request("stranger", a.members, 0.0)
    assert (told(said), said[1].number, said[1].acknowledged) == (["a", "b"], 0, 0)
    a.deltas.heard("stranger", ((), pb.GossipMessage(number=9, reset=True)), a.members)
    a.deltas.failed("stranger")
    assert a.deltas.say("stranger", a.members, full=False)[1].acknowledged == 0


def test_a_member_that_gave_way_is_forgotten_with_what_is_under_way_of_it() -> None:
    a, b = acquainted("a", "b", "ghost")[:2]
    a.change("ghost", health=Health.DEAD)
    request = a.ask(b)
    assert "ghost" in told(request)
    del a.known["ghost"]
    a.hear(b, b.reply(a, request))
    assert told(a.ask(b)) == []
    a.known["ghost"] = member("ghost")
    assert told(a.ask(b)) == ["ghost"]
