"""Real workers end where the specification says, bit for bit."""

from pathlib import Path

import pytest

from tests.support.reference import Hashes, reference_hashes
from tests.support.workers import SMALL, running_swarm, settings_of
from worker.config import load_config


@pytest.mark.parametrize(
    ("preset", "extra"),
    [
        ("diloco", {}),
        ("ddp", {}),
        ("diloco", {"diloco__fragments": 2, "diloco__merge_alpha": 0.5}),
        ("diloco", {"diloco__codec": "bf16", "diloco__reduction_codec": "bf16"}),
    ],
    ids=["diloco", "ddp", "fragments", "bf16"],
)
def test_four_workers_equal_the_reference(
    tmp_path: Path, preset: str, extra: dict[str, object]
) -> None:
    settings = [
        *SMALL,
        *settings_of(run__steps=25, run__seed=3, diloco__inner_steps=10, **extra),
    ]
    with running_swarm(4, tmp_path, "--preset", preset, *settings) as swarm:
        swarm.start_all()
        results = swarm.wait()
    hashes = {Hashes(r["anchor_hash"], r["momentum_hash"]) for r in results.values()}
    rounds = {"ddp": 25}.get(preset, 10 if "diloco__fragments" in extra else 3)
    assert {r["rounds_completed"] for r in results.values()} == {rounds}
    config = load_config(None, settings[1::2], preset)
    assert hashes == {reference_hashes(config, swarm.names)}
