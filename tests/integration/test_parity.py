"""Real workers end where the specification says, bit for bit."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.reference import reference_hashes
from tests.support.workers import SMALL, Hashes, running_swarm, settings_of
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
    hashes = {peer: Hashes.of(r) for peer, r in results.items()}
    rounds = {"ddp": 25}.get(preset, 10 if "diloco__fragments" in extra else 3)
    assert {r["rounds_completed"] for r in results.values()} == {rounds}
    config = load_config(None, settings[1::2], preset)
    assert hashes == reference_hashes(config, swarm.names)


FOUR_BITS = {"diloco__codec": "e3m0", "diloco__reduction_codec": "e3m0"}
FEEDBACK = {"diloco__error_feedback": "true"}


@pytest.mark.parametrize(
    ("preset", "extra"),
    [
        ("streaming", {**FOUR_BITS, **FEEDBACK, "diloco__overlap_steps": 3}),
        ("streaming", {"diloco__codec": "int4", "diloco__rounding": "stochastic"}),
        ("diloco", {**FEEDBACK, "diloco__codec": "topk", "diloco__reduction_codec": "fp16"}),
        (
            "streaming",
            {**FOUR_BITS, "diloco__merge_alpha": 0.0, "diloco__eager": "true"},
        ),
        ("onebit", {}),
        ("sparse", {}),
    ],
    ids=[
        *("streaming in e3m0 with feedback", "stochastic int4", "topk and fp16", "eager"),
        *("onebit", "sparse"),
    ],
)
def test_two_workers_equal_the_reference_in_few_bits(
    tmp_path: Path, preset: str, extra: Mapping[str, object]
) -> None:
    settings = [
        *SMALL,
        *settings_of(run__steps=18, run__seed=3, diloco__inner_steps=6, **extra),
    ]
    with running_swarm(2, tmp_path, "--preset", preset, *settings) as swarm:
        swarm.start_all()
        results = swarm.wait()
    assert {r["rounds_failed"] for r in results.values()} == {0}
    assert {e["contributors"] for e in swarm.workers["w0"].of("round")} == {2}
    fragments = {e["fragment"] for e in swarm.workers["w0"].of("round")}
    assert fragments == ({0} if preset == "diloco" else {0, 1, 2})  # two layers, and the rest
    hashes = {peer: Hashes.of(r) for peer, r in results.items()}
    config = load_config(None, settings[1::2], preset)
    assert hashes == reference_hashes(config, swarm.names)


def test_streaming_without_its_parts_is_diloco(tmp_path: Path) -> None:
    """One fragment, no overlap, no merge, fp32: the preset's name changes nothing else."""
    plain = settings_of(
        diloco__fragments=1,
        diloco__overlap_steps=0,
        diloco__merge_alpha=0.0,
        diloco__codec="fp32",
        diloco__reduction_codec="fp32",
        diloco__error_feedback="false",
    )
    shared = [*SMALL, *settings_of(run__steps=13, diloco__inner_steps=5)]
    with running_swarm(2, tmp_path, "--preset", "streaming", *shared, *plain) as swarm:
        swarm.start_all()
        results = swarm.wait()
    assert {r["rounds_completed"] for r in results.values()} == {3}
    hashes = {peer: Hashes.of(r) for peer, r in results.items()}
    diloco = load_config(None, shared[1::2], "diloco")
    assert hashes == reference_hashes(diloco, swarm.names)


@pytest.mark.parametrize("preset", ["diloco", "ddp"])
def test_running_statistics_are_averaged(tmp_path: Path, preset: str) -> None:
    settings = settings_of(
        task__name='"tests.support.statistics_task:Normalised"',
        run__steps=12,
        diloco__inner_steps=4,
    )
    with running_swarm(2, tmp_path, "--preset", preset, *settings) as swarm:
        swarm.start_all()
        results = swarm.wait()
    hashes = {peer: Hashes.of(r) for peer, r in results.items()}
    assert len(set(hashes.values())) == 1
    assert hashes == reference_hashes(load_config(None, settings[1::2], preset), swarm.names)
    assert len({result["val_loss"] for result in results.values()}) == 1
