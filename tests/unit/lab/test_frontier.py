"""The search of bytes against loss: bytes, and the losses that are compared."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from murmuration.algorithms.fragments import TensorSpec, partition
from murmuration.algorithms.presets import PRESETS
from murmuration.worker.tasks import Cursor
from murmuration.worker.training.replica import InnerReplica
from tests.lab.frontier import (
    TUNING_SEED,
    Grid,
    Point,
    Rates,
    Result,
    Results,
    Run,
    fewer_with_last_mean,
    finish,
    rate,
    share,
    table,
)
from tests.lab.one_process import Training, last_mean_bytes, sent, train

TINY = (
    "task.batch_size=1",
    "task.context_bytes=8",
    "task.architecture={hidden_size=8,intermediate_size=8,num_hidden_layers=1,"
    "num_attention_heads=2,num_key_value_heads=2}",
)
ALONE, DDP = Point("local", None), Point("ddp", None)
ONE_BIT = Point("onebit", 28)


def run_of(point: Point, **changes: Any) -> Run:
    run = Run(point, "adamw", Rates(0.01), seed=0, steps=3, workers=2, settings=TINY)
    return replace(run, **changes)


def result(loss: float, fewer: float = 400.0) -> Result:
    params = 500_000  # of two workers, so that bf16 DDP sends a megabyte in a step
    return Result(loss, sent_bytes=1e6 / fewer if fewer else 0, fewer=fewer, params=params, cpu_s=1)


def test_one_worker_alone_takes_no_outer_step() -> None:
    training = Training(preset="local", settings=TINY, steps=5, workers=4, seed=3)
    trained = train(training)
    assert list(trained.outer) == ["w0"]
    config = training.config
    replica = InnerReplica(
        trained.task, trained.task.model(), config.inner, Cursor(seed=3, stream="w0"), 5
    )
    for step in range(1, 6):
        replica.inner_step(step, replica.backward(step))
    for fragment, anchor in zip(trained.fragments, trained.anchors(), strict=True):
        assert torch.equal(anchor, fragment.flatten(replica.parameters))
    assert trained.sent.bytes == 0


@pytest.mark.parametrize("preset", ["onebit", "sparse"])
def test_bytes_are_a_four_hundredth_of_ddp_in_bf16(preset: str) -> None:
    plan = PRESETS[preset]
    fragments = partition([TensorSpec("x", (1 << 20,))], 1, "strided")
    steps = 100 * plan.inner_steps
    ddp = replace(PRESETS["ddp"], codec="bf16", reduction_codec="bf16")
    ratio = sent(ddp, fragments, steps, 4).bytes / sent(plan, fragments, steps, 4).bytes
    assert ratio == pytest.approx(400, rel=0.01)


@pytest.mark.parametrize("workers", [2, 4])
def test_the_exact_mean_that_ends_a_run_is_two_steps_of_ddp_in_bf16(workers: int) -> None:
    fragments = partition([TensorSpec("x", (1 << 20,))], 1, "strided")
    ddp = replace(PRESETS["ddp"], codec="bf16", reduction_codec="bf16")
    assert last_mean_bytes(PRESETS["onebit"], 1 << 20, workers) == (
        sent(ddp, fragments, 2, workers).bytes
    )
    assert last_mean_bytes(PRESETS["streaming"], 1 << 20, workers) == 0


@pytest.mark.parametrize(("steps", "share"), [(600, 171), (2400, 300), (10_000, 370)])
def test_what_a_run_sends_less_counts_its_last_mean(steps: int, share: int) -> None:
    run = run_of(ONE_BIT, steps=steps)
    assert fewer_with_last_mean(run, result(2.0)) == pytest.approx(share, abs=0.5)
    streaming = run_of(Point("streaming", 100), steps=steps)
    assert fewer_with_last_mean(streaming, result(2.0)) == pytest.approx(400)


def test_the_rates_with_the_least_loss_are_taken_of_what_is_finished(tmp_path: Path) -> None:
    grid = Grid(3, 2, TINY, Results(tmp_path / "results.jsonl"))  # and nothing to train in
    pairs = [(ONE_BIT, "adamw"), (DDP, "adamw")]
    for rates, loss in ((Rates(0.01), 2.0), (Rates(0.03), 1.5)):
        grid.results.add(grid.run(pairs[0], rates, TUNING_SEED), result(loss))
    lrs = [rate("0.01"), rate("adamw=0.03"), rate("muon=0.05")]
    assert grid.tune(pairs, lrs, [1.0]) == {pairs[0]: Rates(0.03)}
    assert grid.tune(pairs, lrs[:1], [1.0]) == dict.fromkeys(pairs, Rates(0.01))  # no choice


def test_what_a_preset_says_is_part_of_a_runs_name(monkeypatch: pytest.MonkeyPatch) -> None:
    before = run_of(ONE_BIT).key
    monkeypatch.setitem(PRESETS, "onebit", replace(PRESETS["onebit"], outer_lr=0.5))
    assert run_of(ONE_BIT).key != before


def test_the_outer_rate_is_the_presets_times_a_factor() -> None:
    plan = run_of(ONE_BIT, rates=Rates(0.01, outer=0.5)).training.config.plan
    assert plan.outer_lr == PRESETS["onebit"].outer_lr / 2


@pytest.mark.parametrize("preset", ["diloco", "streaming"])  # in one fragment, in two
def test_a_run_says_its_loss_and_its_bytes(preset: str) -> None:
    exact = (*TINY, *(f"diloco.{key}=fp32" for key in ("codec", "reduction_codec")))
    asked = run_of(Point(preset, 3), settings=(*exact, "diloco.overlap_steps=0"))
    run, found = finish(asked)
    assert run == asked
    assert found.fewer == pytest.approx(3 / 2)  # once in three steps, in fp32
    assert 0 < found.loss < 10


def test_the_share_of_what_ddp_gains() -> None:
    found = {
        (ALONE, "adamw"): [result(2.0, 0), result(3.0, 0)],
        (DDP, "adamw"): [result(1.0), result(2.0)],
        (ONE_BIT, "adamw"): [result(1.5), result(2.0)],
    }
    assert share(1.75, "adamw", found) == pytest.approx(0.75)
    best = {pair: Rates(0.01) for pair in found} | {(ONE_BIT, "adamw"): Rates(0.003, 0.5)}
    grid = Grid(600, 2, (), Results(Path("none")))
    lines = table(found, best, grid, 2).splitlines()
    assert lines[-1] == (
        "| `onebit`, H 28 | adamw | 0.003, outer x 0.5 | 2.50 kB | 1/400 | 1/171 | 1.750 | 1.500 "
        "| 2.000 | 2 | 0.75 |"
    )
    assert "| `local` | adamw | 0.01 | - | - | - | 2.500 | 2.000 | 3.000 | 2 | 0.00 |" in lines
