"""Pairs in the reference, with anchors that travel in fewer bits."""

import pytest

from algorithms.diloco import mean_in_order
from algorithms.plan import Plan
from algorithms.reference import train
from tests.unit.algorithms.test_reference import fragments_of, slope


@pytest.mark.parametrize("peers", ["ab", "abc", "abcd"])
@pytest.mark.parametrize("shared", [True, False], ids=["shared momentum", "the paper's"])
def test_steps_smaller_than_the_anchors_codec_add_up_in_pairs(shared: bool, peers: str) -> None:
    plan = Plan(
        exchange="pairs",
        inner_steps=1,
        outer_lr=0.5,
        outer_momentum=0.0,
        shared_momentum=shared,
        consensus=False,
        anchor_codec="bf16",
    )
    replicas = {peer: slope("x") for peer in peers}
    for number, replica in enumerate(replicas.values()):
        replica.lr = 0.001 * (1 + number / 10)  # from 4.0, where bf16 goes by steps of 0.03
    ended = train(plan, fragments_of("x"), replicas, 200)
    mean = mean_in_order(each[0].anchor for each in ended.values())
    rate = sum(replica.lr for replica in replicas.values()) / len(peers)
    assert mean.tolist() == pytest.approx([4.0 - 200 * 0.5 * rate] * 2, abs=1e-3)
