"""`murmuration.Swarm` around a loop of one's own: real processes on real sockets."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from murmuration.worker.config import Config, load_config, to_document
from tests.support import own_loop
from tests.support.early_starts import AnchorPrefetch
from tests.support.peers import values
from tests.support.reference import reference_hashes
from tests.support.workers import SMALL, Hashes, settings_of


def run_of(preset: str, steps: int, **more: object) -> tuple[Config, dict[str, object]]:
    """The config of a daemon, and the same as arguments of a peer."""
    settings = settings_of(run__steps=steps, run__seed=3, **more)
    config = load_config(None, [*SMALL, *settings][1::2], preset)
    plan = {key.replace("__", "."): value for key, value in more.items() if "diloco" in key}
    given = {"preset": preset, "steps": steps, "settings": {"run.seed": 3, **plan}}
    return config, {"task": to_document(config), **given}


def ended(folder: Path, count: int, loop: Any) -> dict[str, dict[str, Any]]:
    """The results that this many such peers end with, by name."""
    return {f"p{number}": value for number, value in enumerate(values(folder, *[loop] * count))}


@pytest.mark.parametrize(
    ("preset", "extra"),
    [
        ("streaming", {"diloco__inner_steps": 10, "diloco__overlap_steps": 3}),
        ("noloco", {"diloco__inner_steps": 6}),
        ("ddp", {"inner__clip": 0}),
    ],
    ids=["streaming in 4 bits", "noloco", "ddp"],
)
def test_own_loops_equal_the_reference(tmp_path, preset, extra):
    config, arguments = run_of(preset, 25, **extra)
    results = ended(tmp_path, 4 if preset == "noloco" else 2, partial(own_loop.peer, **arguments))
    assert {result["rounds_failed"] for result in results.values()} == {0}
    hashes = {name: Hashes.of(result) for name, result in results.items()}
    known = {} if preset != "noloco" else {"early_starts": AnchorPrefetch.of_run(tmp_path)}
    assert hashes == reference_hashes(config, [*results], run=results["p0"]["run"], **known)
    # After the block the model is what all agree on.
    assert len({result["model_hash"] for result in results.values()}) == 1


@pytest.mark.parametrize("trainer", ["transformers", "lightning"])
def test_a_trainer_with_a_callback_equals_the_run_of_a_task(tmp_path, trainer):
    config, arguments = run_of(
        "diloco",
        25,
        # Lightning sums the squares of another order of parameters, which rounds otherwise.
        inner__clip=0 if trainer == "lightning" else 1,
        diloco__inner_steps=10,
        inner__warmup_steps=0,
        inner__schedule='"constant"',
    )
    results = ended(tmp_path, 2, partial(own_loop.peer, **arguments, trainer=trainer))
    hashes = {name: Hashes.of(result) for name, result in results.items()}
    assert hashes == reference_hashes(config, [*results], run=results["p0"]["run"])
    assert len({result["model_hash"] for result in results.values()}) == 1
