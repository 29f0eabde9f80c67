"""A peer whose certificate is taken back: the others go on, and nobody speaks with it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from murmuration.protos import murmuration_pb2 as pb
from murmuration.protos.identity import Authority, Role
from murmuration.worker.identity import Gate
from murmuration.worker.membership import Health
from murmuration.worker.transport import Caller, Refused
from tests.protocol.problem import steady
from tests.protocol.swarm import Swarm
from tests.protocol.virtual_time import run


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
            caller = Caller("ipv4:127.0.0.1:1", "peer", "c")
            with pytest.raises(Refused, match="peer c was expelled"):
                await swarm["b"].node.server.on_call("Control/Status", b"", caller)
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
            swarm["a"].node.gossip.learn_revoked(other.revocations())
            assert swarm["a"].node.gossip.view.members["b"].health is Health.ALIVE
            await swarm.finished()
            swarm.assert_equal(versions=(12,))

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
