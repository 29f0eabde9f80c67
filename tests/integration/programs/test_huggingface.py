"""Hugging Face's trainer as a peer: what it saves, how fast it learns, whose word is last, and
what becomes of one that fails."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import murmuration
from tests.support.peers import Peer, peers, row
from tests.support.regression import (
    PRESETS,
    STEPS,
    H,
    Regression,
    check_rates,
    ends,
    rates_beside,
    rows,
    starts,
    swarm_of,
)

# What the library warns of by itself.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
transformers = pytest.importorskip("transformers")  # its parts are imported when a test uses them


def hf(
    folder: Path, callbacks: list[Any], model: nn.Module | None = None, **more: Any
) -> "transformers.Trainer":
    given = {
        "max_steps": STEPS,
        "save_strategy": "no",
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 8,
        **more,
    }
    trainer = transformers.Trainer(
        model or Regression(),
        transformers.TrainingArguments(
            output_dir=str(folder), report_to="none", use_cpu=True, disable_tqdm=True, **given
        ),
        train_dataset=rows(),
        eval_dataset=rows(),
        data_collator=lambda rows: {
            "inputs": torch.stack([each[0] for each in rows]),
            "labels": torch.stack([each[1] for each in rows]),
        },
        callbacks=callbacks,
    )
    trainer.remove_callback(transformers.PrinterCallback)  # what a peer prints is JSON
    return trainer


@row("Hugging Face's trainer resumes from its checkpoint", "shared", "to the same bits")
@pytest.mark.parametrize("preset", ["noloco", "prolonged"])
def test_a_trainer_resumes_to_the_same_bits(tmp_path, preset):
    longer = {"max_steps": STEPS + 8} if preset == "prolonged" else {}
    preset = preset if preset in PRESETS else "streaming"

    def trained(folder: str, resume: bool = False, **more: Any) -> list[str]:
        callback = murmuration.hf.SwarmCallback(**swarm_of(preset))
        given = {"save_strategy": "steps", "save_steps": 9, "lr_scheduler_type": "constant"}
        trainer = hf(tmp_path / folder, [callback], **given, **more)
        trainer.train(resume_from_checkpoint=str(tmp_path / "cut/checkpoint-9") if resume else None)
        return ends(callback.swarm, trainer.model)

    whole = trained("whole", **longer)
    trained("cut")
    assert trained("cut", resume=True, **longer) == whole


def rates_of_hf(peer: Peer) -> dict[str, Any]:
    seen: dict[int, float] = {}

    class Rates(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            seen[state.global_step] = others["optimizer"].param_groups[0]["lr"]

    callback = murmuration.hf.SwarmCallback(**peer.arguments)
    trainer = hf(peer.out, [callback, Rates()], max_steps=60, lr_scheduler_type="linear")
    trainer.train()
    return {"seen": seen, "end": trainer.state.global_step}


@row(
    "Hugging Face's trainer that joins under way", "shared", "its schedule begins where the run is"
)
def test_a_trainer_that_joins_goes_on_at_the_learning_rate_of_the_run(tmp_path):
    check_rates(rates_beside(tmp_path, starts, rates_of_hf))


@row("ReduceLROnPlateau in a trainer that joins under way", "told", "it is left as it is")
def test_a_schedule_that_cannot_catch_up_is_told(tmp_path, caplog):
    callback = murmuration.hf.SwarmCallback(**swarm_of("diloco"))
    more = {"save_strategy": "steps", "eval_strategy": "steps", "save_steps": 9, "eval_steps": 9}
    hf(tmp_path, [callback], **more).train()
    trainer = hf(tmp_path, [callback], lr_scheduler_type="reduce_lr_on_plateau", **more)
    state = transformers.TrainerState(global_step=0, max_steps=STEPS)
    trainer.create_optimizer_and_scheduler(STEPS)
    callback._scheduler = trainer.lr_scheduler
    callback._catch_up(state)
    assert "ReduceLROnPlateau does not follow the position in the run" in caplog.text
    assert state.global_step == STEPS


@row("A trainer that goes on from a checkpoint of no swarm", "told", "this peer begins at step 0")
def test_a_checkpoint_without_a_swarms_state_is_told(tmp_path, caplog):
    hf(tmp_path, [], save_strategy="steps", save_steps=9).train()
    callback = murmuration.hf.SwarmCallback(**swarm_of("diloco"))
    hf(tmp_path, [callback]).train(resume_from_checkpoint=str(tmp_path / "checkpoint-9"))
    assert "goes on from step 9, and its checkpoint has no state of a swarm" in caplog.text
    assert callback.swarm is not None
    assert callback.swarm.step == STEPS - 9


def test_a_trainer_ends_with_the_anchor(tmp_path, caplog):
    callback = murmuration.hf.SwarmCallback(**swarm_of("diloco"))
    trainer = hf(tmp_path, [callback], save_strategy="steps", save_steps=STEPS)
    trainer.train()
    anchor, _, model = ends(callback.swarm, trainer.model)
    assert anchor == model
    saved = load_file(tmp_path / f"checkpoint-{STEPS}/model.safetensors")
    assert all(torch.equal(saved[n], p) for n, p in trainer.model.named_parameters())
    assert "does not hold" not in caplog.text


@row("load_best_model_at_end", "told", "the model holds this peer's best checkpoint")
def test_the_best_model_of_a_trainer_stays(tmp_path, caplog):
    callback = murmuration.hf.SwarmCallback(**swarm_of("diloco"))
    trainer = hf(
        tmp_path,
        [callback],
        save_strategy="steps",
        eval_strategy="steps",
        save_steps=3,
        eval_steps=3,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=True,  # the first
    )
    trainer.train()
    best = trainer.state.best_model_checkpoint
    assert best.endswith("checkpoint-3")
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric)
    assert "load_best_model_at_end" in caplog.text
    assert callback.swarm is not None
    assert callback.swarm.step == STEPS
    assert callback.swarm.metrics["rounds_completed"] == 5


@row("EMA or SWA by a callback of a trainer", "told", "the model holds the average at the end")
@pytest.mark.parametrize("first", [True, False])
def test_an_average_of_a_callback_stays(tmp_path, first, caplog):
    class KeepsEma(transformers.TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            self.average = torch.optim.swa_utils.AveragedModel(others["model"])

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            self.average.update_parameters(others["model"])

        def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            others["model"].load_state_dict(self.average.module.state_dict())

    callback, ema = murmuration.hf.SwarmCallback(**swarm_of("diloco")), KeepsEma()
    trainer = hf(tmp_path, [ema, callback] if first else [callback, ema])
    trainer.train()
    averaged = ema.average.module.parameters()
    for mine, theirs in zip(trainer.model.parameters(), averaged, strict=True):
        assert torch.equal(mine, theirs)
    assert ("does not hold what the swarm agrees on" in caplog.text) is first


def failing(error: BaseException, at: int = 6) -> Any:
    """A callback that raises once, at a step."""

    class Fails(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            nonlocal at
            if state.global_step == at:
                at = 0
                raise error

    return Fails()


@row("An exception in trainer.train(), as in a notebook", "told", "the peer leaves; train again")
@pytest.mark.parametrize(
    ("error", "again"), [(RuntimeError("no memory"), "another"), (KeyboardInterrupt(), "a loop")]
)
def test_a_trainer_that_failed_can_train_again(tmp_path, error, again, caplog):
    callback = murmuration.hf.SwarmCallback(**swarm_of("diloco"))
    trainer = hf(tmp_path, [callback, failing(error)])
    with pytest.raises(type(error)):
        trainer.train()
    if again == "a loop":
        optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
        with murmuration.Swarm(trainer.model, optimizer):
            pass
    else:
        callback = murmuration.hf.SwarmCallback(**swarm_of("diloco"))
        hf(tmp_path, [callback], trainer.model).train()
        assert callback.swarm is not None
        assert callback.swarm.done
    assert "training has failed: this peer leaves the swarm" in caplog.text


def fails(peer: Peer) -> None:
    """The second peer's trainer is interrupted, and its process lives on, as a notebook does."""
    callback = murmuration.hf.SwarmCallback(inner_steps=H, **peer.arguments)
    trainer = hf(peer.out, [callback, failing(KeyboardInterrupt())])
    try:
        trainer.train()
    except KeyboardInterrupt:
        signal.pause()


def goes_on(peer: Peer) -> int:
    callback = murmuration.hf.SwarmCallback(inner_steps=H, **peer.arguments)
    hf(peer.out, [callback]).train()
    assert callback.swarm is not None
    return callback.swarm.step


@row("A peer whose trainer has failed in a process that lives on", "shared", "nobody waits for it")
def test_nobody_waits_for_a_trainer_that_failed(tmp_path):
    with peers(tmp_path, goes_on, fails) as found:
        for index in range(2):
            found.start(index)
        first = found.outcome(0)
    assert (first.error, first.value) == ("", STEPS)
    assert "p1 has left" in first.log
