"""A reducer answers something else than the mean: it is caught, named and passed over."""

import pytest
import torch

from tests.protocol.problem import Problem
from tests.protocol.swarm import Peer, Swarm
from tests.protocol.virtual_time import run
from tests.support.false_means import LIES, reducing_falsely

LONG = Problem(steps=60)


def named(peer: Peer) -> list[str]:
    """The peers that this one has caught."""
    told = [str(event["text"]) for event in peer.of_kind("warning")]
    return [text.split()[0] for text in told if "gave a false mean" in text]


@pytest.mark.parametrize("lie", ["1e4", "-20 times"])
def test_a_mean_that_is_larger_than_all_contributions_is_not_applied(lie: str) -> None:
    async def scenario() -> None:
        async with Swarm(LONG) as swarm:
            await swarm.start(*"abcd")
            with reducing_falsely("d", LIES[lie]):
                honest = [swarm[name] for name in "abc"]
                await swarm.until(lambda: all(peer.versions >= (3,) for peer in honest), 60)
            assert [named(peer) for peer in honest] == [["d"]] * 3
            assert len({peer.outer_hash for peer in honest}) == 1
            expected = LONG.reference("abcd")["a"][0].anchor
            anchor = honest[0].trainer.states[0].anchor
            assert torch.dist(anchor, expected) < torch.linalg.vector_norm(expected)
            assert "d" in honest[0].node.status()["quarantine"]

    run(scenario())
