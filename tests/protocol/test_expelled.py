"""A peer whose certificate is taken back: the others go on, and nobody speaks with it. And when
a certificate is renewed, of a worker and of a coordinator."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker.identity import gate
from murmuration.worker.identity.authority import (
    REVOCATION,
    Authority,
    Credentials,
    Renewal,
    revocation,
)
from murmuration.worker.identity.certificates import Identity, IdentityError, Role, has_signed
from murmuration.worker.identity.gate import Gate, KeyHolders
from murmuration.worker.membership import Health
from murmuration.worker.transport import Caller, Refused, Stream, Unreachable
from murmuration.worker.wire import WireError
from tests.protocol.problem import steady
from tests.protocol.swarm import Swarm
from tests.protocol.taps import Scripted
from tests.protocol.virtual_time import run

CAROL = Caller("ipv4:127.0.0.1:1", "peer", "c")


async def test_an_expelled_peer_is_in_no_round_of_the_others(tmp_path):
    """One of them is told; the entry goes on with gossip."""
    async with Swarm(steady(60), "abc", authority=Authority.make(tmp_path), at=1) as swarm:
        swarm.authority.expel("c")
        swarm["a"].node.gossip.learn_revoked(swarm.authority.revocations())

        def seen(by: str) -> Health:
            return swarm[by].node.gossip.view.members["c"].health

        await swarm.until(lambda: seen("a") is Health.LEFT and seen("b") is Health.LEFT, 5)
        with pytest.raises(Refused, match="peer c was expelled"):
            await swarm["b"].node.server.on_call("Control/Status", b"", CAROL)
        await swarm.until(lambda: swarm["a"].done and swarm["b"].done, 300)
        assert swarm["a"].of_kind("round")[-1]["contributors"] == 2
        assert seen("a") is seen("b") is Health.LEFT, "it is not taken in again"
        swarm.kill("c")


async def test_only_the_authority_expels(tmp_path):
    authority, other = (Authority.make(tmp_path / name) for name in ("one", "other"))
    async with Swarm(steady(60), "ab", authority=authority, at=1) as swarm:
        other.new_identity(Role.PEER, "b")
        other.expel("b")
        with pytest.raises(WireError, match="has not signed"):
            swarm["a"].node.gossip.learn_revoked(other.revocations())
        assert swarm["a"].node.gossip.view.members["b"].health is Health.ALIVE
        await swarm.ends_equal(versions=(12,))


async def test_an_expulsion_outlives_a_restart_without_the_one_that_made_it(tmp_path):
    async with Swarm(steady(300), "abc", authority=Authority.make(tmp_path), at=1) as swarm:
        swarm.authority.expel("c")
        swarm["a"].node.gossip.learn_revoked(swarm.authority.revocations())
        await swarm.until(lambda: "b" in swarm.kept_revoked, 10)
        for name in "ab":
            swarm.kill(name)
        await swarm.restart("b", via=())
        with pytest.raises(Refused, match="peer c was expelled"):
            await swarm["b"].node.server.on_call("Control/Status", b"", CAROL)
        swarm.kill("c")


def test_what_a_peer_keeps_of_it_is_read_again(tmp_path):
    authority = Authority.make(tmp_path)
    identity = authority.new_identity(Role.PEER, "b")
    authority.expel("b")
    kept = Credentials.of(identity, tmp_path)
    assert kept.revoked() == []
    kept.keep_revoked(authority.revocations())
    assert kept.revoked() == authority.revocations()
    (tmp_path / "identity" / "revoked.json").write_text("[")
    with pytest.raises(IdentityError, match="remove it"):
        kept.revoked()


async def test_open_streams_of_an_expelled_peer_end(tmp_path):
    async with Swarm(steady(60), "abc", authority=Authority.make(tmp_path), at=1) as swarm:
        server, began = swarm["a"].node.server, asyncio.Event()

        async def serve(stream: Stream) -> None:
            began.set()
            await asyncio.Event().wait()

        server.streams["Data/Fetch"] = serve
        held = asyncio.create_task(server.on_stream("Data/Fetch", Scripted(), CAROL))
        await began.wait()
        swarm.authority.expel("c")
        swarm["a"].node.gossip.learn_revoked(swarm.authority.revocations())
        await swarm.until(held.done, 0.1)
        swarm.kill("c")


async def test_any_number_of_expulsions_reaches_everybody(tmp_path):
    async with Swarm(steady(300), "ab", authority=Authority.make(tmp_path)) as swarm:
        key = (tmp_path / "identity" / "authority.key").read_bytes()
        swarm["a"].node.gossip.learn_revoked(
            revocation(key, f"peer/p{number}") for number in range(950)
        )
        await swarm.until(lambda: len(swarm.kept_revoked.get("b", ())) == 950, 60)


@pytest.mark.parametrize("count", [100, 10_000])
async def test_of_false_revocations_one_is_verified(count, tmp_path, monkeypatch):
    """In each answer of a member, and rounds go on meanwhile."""
    verified: list[bytes] = []

    def counted(key: ec.EllipticCurvePublicKey, signature: bytes, content: bytes) -> bool:
        if content.startswith(REVOCATION):
            verified.append(content)
        return has_signed(key, signature, content)

    monkeypatch.setattr(gate.certificates, "has_signed", counted)
    async with Swarm(steady(60), "abc", authority=Authority.make(tmp_path), at=1) as swarm:
        liar, false = swarm["c"].node, [pb.Revocation(subject="peer/a", signature=bytes(64))]
        assert liar._expulsions is not None
        liar._expulsions.hash, answers = 1, []

        def part() -> list[pb.Revocation]:
            answers.append(1)
            return false * count

        liar._expulsions.part = part  # type: ignore[method-assign]  # it lies
        await swarm.until(lambda: swarm["a"].versions >= (3,), 60)
        assert 0 < len(answers) >= len(verified)
        assert swarm["a"].node.gossip.view.members["a"].health is Health.ALIVE


async def test_the_holder_of_a_revoked_token_is_told_so(tmp_path):
    """By whoever has the run's key, though it has heard of the end of the token from others."""
    authority = Authority.make(tmp_path)
    caller = Caller("ipv4:127.0.0.1:1", "token", authority.create_token().id)
    gate = Gate(
        authority,
        offload=at_once,
        refused=lambda: None,
        revoked=lambda asked: asked == caller,
        log=lambda event: None,
    )
    request = pb.EnrolRequest(name="new").SerializeToString()
    gate.check("Control/Enrol", request, caller)
    reply = pb.EnrolReply.FromString(await gate.enrol(request, caller))
    assert reply.refusal == f"token {caller.name} was revoked"


async def at_once(work: Callable[[], Any]) -> Any:
    return work()


T = TypeVar("T")
HOUR_S = 3600.0


async def offload(work: Callable[[], T], /) -> T:
    return work()


class Scenario:
    """One process with a certificate that began 30 days ago and is due in 8 hours."""

    def __init__(self, folder: Path, role: Role) -> None:
        self.run = Authority.make(folder / "authority")
        self.held = self.first = self.run.new_identity(role, "somebody", valid_s=15.5 * 24 * HOUR_S)
        self.events: list[dict[str, object]] = []
        self.asked_at: list[float] = []
        self.answer: bytes | None = None
        self.renewed_at: float | None = None
        self.began = datetime.now(UTC)

    async def ask(self, request: pb.EnrolRequest) -> bytes | None:
        self.asked_at.append(self.clock())
        return self.answer

    def clock(self) -> float:
        return asyncio.get_running_loop().time()

    def show(self, identity: Identity) -> None:
        self.held, self.renewed_at = identity, self.clock()

    async def wait(self, hours: float, *, holds_key: bool) -> None:
        renewal = Renewal(
            self.first,
            self.run if holds_key else None,
            ask=self.ask,
            keep=lambda identity: None,
            renewed=self.show,
            offload=offload,
            log=self.events.append,
            now=lambda: self.began + timedelta(seconds=self.clock()),
        )
        with suppress(TimeoutError):
            await asyncio.wait_for(renewal.run(), hours * HOUR_S)


@pytest.mark.parametrize("role", [Role.COORDINATOR, Role.PEER])
def test_it_is_renewed_when_a_third_of_its_time_is_left(tmp_path, role):
    there = Scenario(tmp_path, role)
    run(there.wait(20, holds_key=True))
    assert there.renewed_at == pytest.approx(8 * HOUR_S, abs=11)
    assert (there.held.role, there.held.name, there.held.key) == (role, "somebody", there.first.key)
    assert there.held.expires - there.first.expires > timedelta(days=300)
    assert [event["event"] for event in there.events] == ["renewed"]


def test_who_has_no_key_asks_once_a_minute_and_says_that_nobody_renews_it(tmp_path):
    there = Scenario(tmp_path, Role.PEER)
    run(there.wait(9, holds_key=False))
    assert there.asked_at[0] == pytest.approx(8 * HOUR_S, abs=11)
    assert 50 <= len(there.asked_at) <= 61
    assert there.held is there.first
    (warning,) = there.events
    assert "nobody that answers holds the run's key" in str(warning["text"])


def test_a_peer_that_gives_the_old_certificate_back_has_renewed_nothing(tmp_path):
    there = Scenario(tmp_path, Role.PEER)
    there.answer = there.first.certificate
    run(there.wait(9, holds_key=False))
    assert there.held is there.first
    assert "or no later one" in str([event["text"] for event in there.events])


def test_those_that_may_hold_the_key_are_asked_in_turn_until_one_gives_a_certificate():
    asked: list[str] = []

    class Transport:
        async def call(self, address: str, *_: object) -> bytes:
            asked.append(address)
            if address == "coordinator":
                raise Unreachable("it is away")
            refusal = "" if address == "third" else "the key is not here"
            return pb.EnrolReply(refusal=refusal, certificate=b"later").SerializeToString()

    there: Any = Transport()
    holders = KeyHolders(there, lambda: ["coordinator", "joined", "third", "fourth"])
    assert run(holders.ask(pb.EnrolRequest())) == b"later"
    assert asked == ["coordinator", "joined", "third"]
    run(holders.ask(pb.EnrolRequest()))  # what the third has given may have been false
    assert asked[3:] == ["fourth", "coordinator", "joined", "third"]
