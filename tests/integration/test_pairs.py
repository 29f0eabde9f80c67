"""Real workers in pairs end where the specification says."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from murmuration.worker.config import load_config
from tests.support.head_starts import AnchorPrefetch
from tests.support.reference import reference_hashes
from tests.support.workers import SMALL, Hashes, running_swarm, settings_of

# A partner that a busy machine holds up is waited for, whoever is in doubt of it.
PATIENT = settings_of(
    rounds__patience_s=60, membership__probe_timeout_s=5, membership__suspicion_factor=20
)


@pytest.mark.parametrize(
    ("preset", "extra"),
    [
        ("noloco", {"diloco__consensus": "false"}),
        ("streaming-noloco", {"diloco__overlap_steps": 3}),
    ],
    ids=["without consensus", "streaming-noloco in 4 bits"],
)
def test_four_workers_in_pairs_equal_the_reference(
    tmp_path: Path, preset: str, extra: Mapping[str, object]
) -> None:
    settings = [*SMALL, *settings_of(run__steps=25, run__seed=3, diloco__inner_steps=6, **extra)]
    with running_swarm(4, tmp_path, "--preset", preset, *settings, *PATIENT) as swarm:
        swarm.start_all()
        results = swarm.wait()
        rounds = [event for name in swarm.names for event in swarm.workers[name].of("round")]
        head_starts = AnchorPrefetch({name: swarm.workers[name].events for name in swarm.names})
    assert {result["rounds_failed"] for result in results.values()} == {0}
    consensus = "diloco__consensus" not in extra
    assert {event["contributors"] for event in rounds} == ({2, 4} if consensus else {2})
    hashes = {peer: Hashes.of(result) for peer, result in results.items()}
    assert len(set(hashes.values())) == (1 if consensus else 2)  # who met last hold the same
    config = load_config(None, settings[1::2], preset)
    if config.plan.overlap_steps == 0:  # else whether one comes in time is up to the network
        assert (len(head_starts) > 0) == config.plan.shared_momentum
    assert hashes == reference_hashes(config, swarm.names, head_starts)
