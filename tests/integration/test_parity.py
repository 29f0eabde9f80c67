"""Real workers end where the specification says, bit for bit."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from murmuration.worker.config import load_config
from murmuration.worker.training.evaluation import anchored_model, find_checkpoint
from tests.support.head_starts import AnchorPrefetch
from tests.support.reference import reference_hashes
from tests.support.statistics_task import FIRST_COUNT, Normalised
from tests.support.workers import SMALL, Hashes, running_swarm, settings_of


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


@pytest.mark.parametrize(
    ("preset", "extra"),
    [
        ("streaming", {**FOUR_BITS, "diloco__overlap_steps": 3}),
        ("streaming", {"diloco__codec": "int8"}),
        ("onebit", {"diloco__codec": "topk", "diloco__reduction_codec": "bf16"}),
        ("onebit", {}),
        ("sparse", {}),
        ("co2", {"diloco__staleness_penalty": 1.0, "diloco__outer_momentum_clip": 0.001}),
        ("kseed", {}),
        ("kseed", {"diloco__codec": "int8", "diloco__reduction_codec": "int8"}),
    ],
    ids=[
        *("streaming in e3m0", "int8", "topk and bf16"),
        *("onebit", "sparse", "co2", "kseed", "kseed in int8"),
    ],
)
def test_two_workers_equal_the_reference(
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
    assert fragments == (
        {0} if preset in ("diloco", "co2", "kseed") else {0, 1, 2}
    )  # two layers, and the rest
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
    )
    shared = [*SMALL, *settings_of(run__steps=13, diloco__inner_steps=5)]
    with running_swarm(2, tmp_path, "--preset", "streaming", *shared, *plain) as swarm:
        swarm.start_all()
        results = swarm.wait()
    assert {r["rounds_completed"] for r in results.values()} == {3}
    hashes = {peer: Hashes.of(r) for peer, r in results.items()}
    diloco = load_config(None, shared[1::2], "diloco")
    assert hashes == reference_hashes(diloco, swarm.names)


@pytest.mark.parametrize(
    ("preset", "extra"),
    [
        ("diloco", {}),
        ("diloco", {"diloco__codec": "int8"}),
        ("ddp", {}),
        ("streaming", FOUR_BITS | {"diloco__overlap_steps": 2, "diloco__merge_alpha": 0.5}),
        ("onebit", {"diloco__overlap_steps": 1}),
        ("noloco", {"diloco__anchor_codec": "bf16"}),
        ("noloco", {"diloco__codec": "sign", "diloco__merge": "keep"}),
    ],
    ids=[
        *("diloco", "int8", "ddp", "streaming", "onebit", "noloco"),
        "noloco in one bit",
    ],
)
def test_running_statistics_are_averaged_and_integers_the_first_peers(
    tmp_path: Path, preset: str, extra: Mapping[str, object]
) -> None:
    settings = settings_of(
        task__name='"tests.support.statistics_task:Normalised"',
        run__steps=12,
        diloco__inner_steps=4,
        **extra,
    )
    with running_swarm(2, tmp_path, "--preset", preset, *settings) as swarm:
        swarm.start_all()
        results = swarm.wait()
    hashes = {peer: Hashes.of(r) for peer, r in results.items()}
    assert len(set(hashes.values())) == 1
    known = {"head_starts": AnchorPrefetch.of_run(tmp_path)} if preset == "noloco" else {}
    config = load_config(None, settings[1::2], preset)
    assert hashes == reference_hashes(config, swarm.names, **known)
    assert len({result["val_loss"] for result in results.values()}) == 1
    saved = find_checkpoint(tmp_path / "w1").tensors
    assert saved["anchor/1.num_batches_tracked"].dtype is torch.int64
    behind = 0 if preset in ("diloco", "ddp", "noloco") else 4  # sent before the last step
    assert 12 - behind <= saved["anchor/1.num_batches_tracked"] <= 12
    assert saved["anchor/1.seen"].tolist() == [True, False]
    counted = saved["anchor/1.positive"] - FIRST_COUNT
    assert 0 < counted.max() <= 12 * 16
    anchored = anchored_model(find_checkpoint(tmp_path / "w1"), config, Normalised(seed=0))
    assert torch.equal(anchored[1].positive - FIRST_COUNT, counted)
