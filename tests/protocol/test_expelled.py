"""A peer whose certificate is taken back: the others go on, and nobody speaks with it."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker.identity import Authority, IdentityError, Role
from murmuration.worker.identity.authority import revocation
from murmuration.worker.identity.certificates import Verifier
from murmuration.worker.identity.gate import Gate
from murmuration.worker.membership import Health
from murmuration.worker.node.admission import Credentials
from murmuration.worker.transport import Caller, Refused, Stream
from murmuration.worker.wire import WireError
from tests.protocol.problem import steady
from tests.protocol.swarm import Swarm
from tests.protocol.test_streams_in_time import Silent
from tests.protocol.virtual_time import run

CAROL = Caller("ipv4:127.0.0.1:1", "peer", "c")


def test_an_expelled_peer_is_in_no_round_of_the_others(tmp_path: Path) -> None:
    """One of them is told; the entry goes on with gossip."""

    async def scenario() -> None:
        authority = Authority.make(tmp_path)
        async with Swarm(steady(60), authority=authority) as swarm:
            await swarm.start("a", "b", "c")
            await swarm.until(lambda: swarm["a"].versions >= (1,), 60)
            authority.expel("c")
            swarm["a"].node.gossip.learn_revoked(authority.revocations())

            def seen(by: str) -> Health:
                return swarm[by].node.gossip.view.members["c"].health

            await swarm.until(lambda: seen("a") is Health.LEFT and seen("b") is Health.LEFT, 5)
            with pytest.raises(Refused, match="peer c was expelled"):
                await swarm["b"].node.server.on_call("Control/Status", b"", CAROL)
            await swarm.until(lambda: swarm["a"].done and swarm["b"].done, 300)
            rounds = swarm["a"].of_kind("round")
            assert rounds[-1]["contributors"] == 2
            assert seen("a") is seen("b") is Health.LEFT, "it is not taken in again"
            swarm.kill("c")

    run(scenario())


def test_only_the_authority_expels(tmp_path: Path) -> None:
    async def scenario() -> None:
        authority, other = (Authority.make(tmp_path / name) for name in ("one", "other"))
        async with Swarm(steady(60), authority=authority) as swarm:
            await swarm.start("a", "b")
            await swarm.until(lambda: swarm["a"].versions >= (1,), 60)
            other.new_identity(Role.PEER, "b")
            other.expel("b")
            with pytest.raises(WireError, match="has not signed"):
                swarm["a"].node.gossip.learn_revoked(other.revocations())
            assert swarm["a"].node.gossip.view.members["b"].health is Health.ALIVE
            await swarm.finished()
            swarm.assert_equal(versions=(12,))

    run(scenario())


def test_an_expulsion_is_known_after_a_restart_without_the_one_that_made_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        authority = Authority.make(tmp_path)
        async with Swarm(steady(300), authority=authority) as swarm:
            await swarm.start("a", "b", "c")
            await swarm.until(lambda: swarm["a"].versions >= (1,), 60)
            authority.expel("c")
            swarm["a"].node.gossip.learn_revoked(authority.revocations())
            await swarm.until(lambda: "b" in swarm.kept_revoked, 10)
            for name in "ab":
                swarm.kill(name)
            await swarm.restart("b", via=())
            with pytest.raises(Refused, match="peer c was expelled"):
                await swarm["b"].node.server.on_call("Control/Status", b"", CAROL)
            swarm.kill("c")

    run(scenario())


def test_what_a_peer_keeps_of_it_is_read_again(tmp_path: Path) -> None:
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


def test_open_streams_of_an_expelled_peer_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        authority = Authority.make(tmp_path)
        async with Swarm(steady(60), authority=authority) as swarm:
            await swarm.start("a", "b", "c")
            await swarm.until(lambda: swarm["a"].versions >= (1,), 60)
            server = swarm["a"].node.server
            began = asyncio.Event()

            async def serve(stream: Stream) -> None:
                began.set()
                await asyncio.Event().wait()

            server.streams["Data/Fetch"] = serve
            held = asyncio.create_task(server.on_stream("Data/Fetch", Silent(), CAROL))
            await began.wait()
            authority.expel("c")
            swarm["a"].node.gossip.learn_revoked(authority.revocations())
            await swarm.until(held.done, 0.1)
            swarm.kill("c")

    run(scenario())


def test_any_number_of_expulsions_reaches_everybody(tmp_path: Path) -> None:
    async def scenario() -> None:
        authority = Authority.make(tmp_path)
        async with Swarm(steady(300), authority=authority) as swarm:
            await swarm.start("a", "b")
            key = (tmp_path / "identity" / "authority.key").read_bytes()
            swarm["a"].node.gossip.learn_revoked(
                revocation(key, f"peer/p{number}") for number in range(950)
            )
            await swarm.until(lambda: len(swarm.kept_revoked.get("b", ())) == 950, 60)

    run(scenario())


@pytest.mark.parametrize("count", [100, 40_000])
def test_of_false_revocations_one_is_verified(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each answer of a member, and rounds go on meanwhile."""
    verified: list[bytes] = []
    has_signed = Verifier.has_signed

    def counted(self: Verifier, signature: bytes, content: bytes) -> bool:
        verified.append(content)
        return has_signed(self, signature, content)

    monkeypatch.setattr(Verifier, "has_signed", counted)

    async def scenario() -> None:
        async with Swarm(steady(60), authority=Authority.make(tmp_path)) as swarm:
            await swarm.start("a", "b", "c")
            await swarm.until(lambda: swarm["a"].versions >= (1,), 60)
            liar, false = swarm["c"].node, [pb.Revocation(subject="peer/a", signature=bytes(64))]
            assert liar._expulsions is not None
            liar._expulsions.hash, answers = 1, []

            def part() -> list[pb.Revocation]:
                answers.append(1)
                return false * count

            liar._expulsions.part = part  # type: ignore[method-assign]  # it lies
            await swarm.until(lambda: swarm["a"].versions >= (5,), 60)
            assert 0 < len(answers) >= len(verified)
            assert swarm["a"].node.gossip.view.members["a"].health is Health.ALIVE

    run(scenario())


def test_the_holder_of_a_revoked_token_is_told_so(tmp_path: Path) -> None:
    """By whoever has the run's key, though it has heard of the end of the token from others."""
    authority = Authority.make(tmp_path)
    caller = Caller("ipv4:127.0.0.1:1", "token", authority.create_token().id)

    async def scenario() -> None:
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

    run(scenario())


async def at_once(work: Callable[[], Any]) -> Any:
    return work()
