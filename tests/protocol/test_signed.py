"""Members sign what they say of themselves: another member can pass it on, and change nothing."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker.identity import certificates as certs
from murmuration.worker.identity.authority import Authority
from murmuration.worker.identity.certificates import Identity, Role, Verifier
from murmuration.worker.identity.words import SignedWords
from murmuration.worker.membership import Digest, Health, Member, Phase, Signed
from murmuration.worker.transport import Caller, Method
from murmuration.worker.wire import signed_member_to_message
from tests.protocol.problem import Problem, steady
from tests.protocol.swarm import Swarm

MALLORY = Caller("ipv4:127.0.0.1:1", "peer", "mallory")


class Mallory:
    """A member with a certificate of the run, who calls one node with what he makes up."""

    def __init__(self, swarm: Swarm, identity: Identity, run_id: int | None = None) -> None:
        self._swarm, self._run = swarm, swarm.problem.manifest.run
        self.identity = identity
        self.words = SignedWords(identity, run_id or self._run, swarm.loop.time)

    async def says(self, *members: pb.Member) -> pb.GossipMessage:
        said = pb.GossipMessage(
            sender="mallory",
            run=self._run,
            members=members,
            certificates=[self.words.certificate],
            full=True,
        )
        server = self._swarm["a"].node.server
        raw = await server.on_call("Control/Gossip", said.SerializeToString(), MALLORY)
        return pb.GossipMessage.FromString(raw)

    async def member(self, name: str) -> pb.Member:
        return next(each for each in (await self.says()).members if _peer(each) == name)

    def signs(self, member: Member) -> pb.Member:
        """Signs with his own key, whoever it is of."""
        return signed_member_to_message(self.words.signed(member))


def _peer(member: pb.Member) -> str:
    return pb.Member.FromString(member.signed).peer


def seen(swarm: Swarm, by: str, peer: str) -> Member:
    return swarm[by].node.gossip.view.members[peer]


async def test_a_swarm_that_signs_trains_as_one_that_does_not(tmp_path):
    async with Swarm(Problem(steps=30), "abc", authority=Authority.make(tmp_path), at=2) as swarm:
        await swarm.join("d", via=["c"])
        await swarm.ends_equal()
        for peer in swarm.alive:
            assert not peer.refused
            assert len(peer.members) == 4
            for other in peer.node.gossip.others:
                assert other.signed is not None


def forged(of: pb.Member, change: Callable[[pb.Member], object]) -> pb.Member:
    """The member with a change that its peer has not signed."""
    words = pb.Member.FromString(of.signed)
    change(words)
    return pb.Member(
        peer=of.peer, signed=words.SerializeToString(), signature=of.signature, health=of.health
    )


FORGERIES: dict[str, Callable[[pb.Member], object]] = {
    "left": lambda b: setattr(b, "health", pb.HEALTH_LEFT),
    "far on": lambda b: (setattr(b, "heartbeat", b.heartbeat + 5), setattr(b, "step", 50)),
    "elsewhere": lambda b: (setattr(b, "heartbeat", b.heartbeat + 5), setattr(b, "address", "m")),
    "begun again": lambda b: setattr(b, "start_ms", b.start_ms + 1),
    "refuted": lambda b: setattr(b, "incarnation", b.incarnation + 900),
    "done": lambda b: (setattr(b, "heartbeat", b.heartbeat + 5), setattr(b, "phase", 3)),
}


@pytest.mark.parametrize("forgery", FORGERIES)
async def test_words_of_another_are_refused_unless_signed(tmp_path, forgery):
    async with Swarm(steady(60), "ab", authority=Authority.make(tmp_path), at=1) as swarm:
        mallory = Mallory(swarm, swarm.authority.new_identity(Role.PEER, "mallory"))
        card = await mallory.member("b")
        before = seen(swarm, "a", "b")
        for bad in (
            forged(card, FORGERIES[forgery]),
            pb.Member.FromString(forged(card, FORGERIES[forgery]).signed),
            _signed_by(mallory, forged(card, FORGERIES[forgery])),
        ):
            (refused,) = (await mallory.says(bad)).refused
            assert "its words are not signed" in refused
        assert seen(swarm, "a", "b") == before
        assert swarm["a"].refused["member"] == 3
        await swarm.ends_equal(versions=(12,))


def _signed_by(mallory: Mallory, member: pb.Member) -> pb.Member:
    signature = mallory.words._sign(mallory.words._digest(member.signed))
    return pb.Member(peer=member.peer, signed=member.signed, signature=signature)


async def test_a_replay_is_old_after_a_restart_too(tmp_path):
    async with Swarm(steady(100), "abc", authority=Authority.make(tmp_path), at=1) as swarm:
        mallory = Mallory(swarm, swarm.authority.new_identity(Role.PEER, "mallory"))
        old = await mallory.member("b")
        swarm.kill("b")
        await swarm.restart("b", via=["a"])
        await swarm.until(
            lambda: (
                seen(swarm, "a", "b").start_ms == swarm["b"].node.gossip.me.start_ms
                and seen(swarm, "a", "b").phase is Phase.TRAINING
            ),
            60,
        )
        before = seen(swarm, "a", "b")
        as_before = (before.start_ms, before.address, Health.ALIVE)
        for health in (pb.HEALTH_ALIVE, pb.HEALTH_DEAD, pb.HEALTH_LEFT):
            old.health = health
            await mallory.says(old)
            now = seen(swarm, "a", "b")
            assert (now.start_ms, now.address, now.health) == as_before
        assert swarm["a"].node.status()["accusations"] == {}, "it was of an earlier life"
        await swarm.finished()


FAR = 2**64 - 1
CANNOT_BE: dict[str, dict[str, Any]] = {
    "start_ms": {"start_ms": FAR},
    "incarnation": {"incarnation": 2**32 - 1},
    "heartbeat": {"heartbeat": FAR},
    "step": {"step": FAR},
    "stage": {"stage": 9},
    "fragments": {"digests": (Digest(0, 0, 0),) * 9},
    "version": {"digests": (Digest(10**9, 1, 7),)},
}


async def test_words_that_cannot_be_are_refused_though_they_are_signed(tmp_path):
    """Each for what is wrong with it; and a peer whose clock was wrong is believed once it is set
    right, though what it says then is older."""
    async with Swarm(steady(60), "ab", authority=Authority.make(tmp_path), at=1) as swarm:
        mallory = Mallory(swarm, swarm.authority.new_identity(Role.PEER, "mallory"))
        for number, (what, wrong) in enumerate(CANNOT_BE.items(), 2):
            member = replace(Member("mallory", "nowhere", number), **wrong)
            (refused,) = (await mallory.says(mallory.signs(member))).refused
            assert what in refused, refused
            assert "mallory" not in {each["peer"] for each in swarm["a"].members}
        right = Member("mallory", "nowhere", start_ms=1)
        assert not (await mallory.says(mallory.signs(right))).refused
        assert seen(swarm, "a", "mallory").start_ms == 1
        assert swarm["a"].refused["member"] == len(CANNOT_BE)
        await swarm.finished()


async def test_a_message_costs_few_checks(tmp_path, monkeypatch):
    """Whatever a member sends or answers: words of its own by the thousand, and certificates of
    nobody or of all that are known."""
    checked: list[str] = []
    for kind, name in ((certs, "has_signed"), (Verifier, "certified")):
        honest = getattr(kind, name)

        def counted(*said: Any, honest: Any = honest, name: str = name) -> Any:
            checked.append(name)
            return honest(*said)

        monkeypatch.setattr(kind, name, counted)
    authority = Authority.make(tmp_path / "run")
    foreign = Authority.make(tmp_path / "foreign").new_identity(Role.PEER, "b")
    async with Swarm(steady(60), "ab", authority=authority, at=1) as swarm:
        gossip = swarm["a"].node.gossip
        mallory = Mallory(swarm, authority.new_identity(Role.PEER, "mallory"))
        newer = [mallory.signs(Member("mallory", "nowhere", life)) for life in range(1, 200)]
        known = gossip._words.certificates_of(["a", "b"])  # type: ignore[union-attr]
        for certificates in ([mallory.words.certificate, *10 * known], 32 * [foreign.der]):
            checked.clear()
            gossip.read_members(newer, certificates)
            assert len(checked) <= 12, checked


async def test_words_for_another_run_and_certificates_of_another_authority_count_for_nothing(
    tmp_path,
):
    authority, other = (Authority.make(tmp_path / name) for name in ("one", "other"))
    async with Swarm(steady(60), "ab", authority=authority, at=1) as swarm:
        elsewhere = Mallory(swarm, authority.new_identity(Role.PEER, "mallory"), run_id=7)
        me = Member("mallory", "nowhere", start_ms=1)
        (refused,) = (await elsewhere.says(elsewhere.signs(me))).refused
        assert "mallory: its words are not signed by it" in refused
        outside = Mallory(swarm, other.new_identity(Role.PEER, "oscar"))
        oscar = Member("oscar", "nowhere", start_ms=1)
        assert "oscar" in (await outside.says(outside.signs(oscar))).lacks
        assert {each["peer"] for each in swarm["a"].members} == {"a", "b"}
        await swarm.finished()


def test_who_is_heard_of_before_its_certificate_is_a_member_once_it_comes(tmp_path):
    """A reply about a hundred peers lacks room for all certificates: the rest is asked for."""
    authority, clock = Authority.make(tmp_path), [0.0]
    reader = SignedWords(authority.new_identity(Role.PEER, "a"), 1, lambda: clock[0])
    written = SignedWords(authority.new_identity(Role.PEER, "b"), 1, lambda: clock[0])
    message = signed_member_to_message(written.signed(Member("b", "b:1", 1)))
    assert reader.read(message) is None
    assert reader.lacking() == ["b"]
    assert reader.lacking() == [], "it has only just asked"
    (waited,) = reader.learn(written.certificates_of(["b", "nobody"]))
    member = reader.read(waited)
    assert member is not None
    assert member.signed == Signed(message.signed, message.signature)
    assert reader.learn([written.certificate, b"", b"x"]) == []
    ghost = pb.Member(peer="ghost", address="nowhere", start_ms=1).SerializeToString()
    assert reader.read(pb.Member(signed=ghost, signature=b"y")) is None
    asked = 0
    for _ in range(20):
        clock[0] += 1.0
        asked += len(reader.lacking())
    assert asked == 5, "nobody has it"


def test_a_certificate_that_is_not_valid_by_this_machines_date_is_told_of(tmp_path):
    authority = Authority.make(tmp_path)
    told: list[str] = []
    reader = SignedWords(authority.new_identity(Role.PEER, "a"), 1, lambda: 0.0, told.append)
    reader.learn([authority.new_identity(Role.PEER, "b", valid_s=-86_400).der])
    (line,) = told
    assert line.startswith("the certificate of b is not valid now: it is for ")
    assert "and this machine's clock says " in line


async def test_nobody_answers_in_the_name_of_another(tmp_path):
    async with Swarm(Problem(steps=30), "abc", authority=Authority.make(tmp_path), at=2) as swarm:
        calls = swarm["b"].node.server.calls
        honest = calls[Method.GOSSIP]

        async def as_c(request: bytes) -> bytes:
            said, c = pb.GossipMessage.FromString(await honest(request)), seen(swarm, "b", "c")
            said.sender = "c"
            said.progress.CopyFrom(pb.MemberProgress(start_ms=c.start_ms, heartbeat=2**50, step=1))
            return said.SerializeToString()

        calls[Method.GOSSIP] = as_c
        await asyncio.sleep(5)
        assert seen(swarm, "a", "c").heartbeat < 2**50
