"""Real workers end where the specification says, bit for bit."""

import pytest
import torch

from murmuration.worker.config import load_config
from murmuration.worker.training.evaluation import anchored_model, find_checkpoint
from tests.support.early_starts import AnchorPrefetch
from tests.support.reference import reference_hashes
from tests.support.statistics_task import FIRST_COUNT, Normalised
from tests.support.workers import SMALL, Hashes, running_swarm, settings_of

# A partner that a busy machine holds up is waited for, whoever is in doubt of it.
PATIENT = settings_of(
    rounds__patience_s=60, membership__probe_timeout_s=5, membership__suspicion_factor=20
)
FOUR_BITS = {"diloco__codec": "e3m0", "diloco__reduction_codec": "e3m0"}


@pytest.mark.parametrize(
    ("workers", "preset", "extra"),
    [
        (3, "diloco", {"diloco__fragments": 2, "diloco__merge_alpha": 0.5}),
        (4, "streaming-noloco", {"diloco__overlap_steps": 3}),
        (2, "onebit", {"diloco__codec": "topk", "diloco__reduction_codec": "bf16"}),
        (2, "kseed", {"diloco__codec": "int8", "diloco__reduction_codec": "int8"}),
    ],
    ids=["fragments", "pairs", "topk and bf16", "kseed in int8"],
)
def test_workers_equal_the_reference(tmp_path, workers, preset, extra):
    settings = [*SMALL, *settings_of(run__steps=18, run__seed=3, diloco__inner_steps=6, **extra)]
    with running_swarm(workers, tmp_path, "--preset", preset, *settings, *PATIENT) as swarm:
        swarm.start_all()
        results = swarm.wait()
        told = [event for name in swarm.names for event in swarm.workers[name].of("round")]
    assert {r["rounds_failed"] for r in results.values()} == {0}
    pairs = preset == "streaming-noloco"
    assert {e["contributors"] for e in told} == ({2, 4} if pairs else {workers})
    hashes = {peer: Hashes.of(r) for peer, r in results.items()}
    assert len(set(hashes.values())) == 1
    config = load_config(None, settings[1::2], preset)
    assert len({e["fragment"] for e in told}) == (1 if preset == "kseed" else 3)
    known = {"early_starts": AnchorPrefetch.of_run(tmp_path)} if pairs else {}
    assert hashes == reference_hashes(config, swarm.names, **known)


@pytest.mark.parametrize(
    ("preset", "extra"),
    [
        ("ddp", {}),
        ("streaming", FOUR_BITS | {"diloco__overlap_steps": 2, "diloco__merge_alpha": 0.5}),
        ("noloco", {"diloco__codec": "sign", "diloco__merge": "keep"}),
    ],
    ids=["ddp", "streaming", "noloco in one bit"],
)
def test_running_statistics_are_averaged_and_integers_the_first_peers(tmp_path, preset, extra):
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
    known = {"early_starts": AnchorPrefetch.of_run(tmp_path)} if preset == "noloco" else {}
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
