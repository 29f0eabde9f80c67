"""A run is exported, read by transformers, and gone on from by another run; one by seeds too."""

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from murmuration.worker.config import load_config, task_of
from murmuration.worker.training.checkpoint import load
from murmuration.worker.training.export import export
from tests.support.workers import SMALL, printed, report_of, running_swarm, settings_of, swarm_ended


def difference(run: Path, exported: Path) -> float:
    """The largest, of a logit as transformers computes it from one of the run's own model."""
    return float(printed(str(run), str(exported), program="tests.support.logits"))


def loss_of(run: Path) -> str:
    (found,) = re.findall(r"loss (\d+\.\d+)[^,]*, perplexity", printed("evaluate", str(run)))
    return str(found)


def test_transformers_reads_it_and_another_run_begins_with_it(tmp_path):
    quick = ("--workers", "2", *SMALL)
    assert swarm_ended(tmp_path / "first", "--steps", "40", *quick).returncode == 0
    told = printed("export", str(tmp_path / "first"), str(tmp_path / "exported"))
    assert told.endswith("of step 40, Hugging Face's layout\n")
    assert difference(tmp_path / "first", tmp_path / "exported") < 1e-5
    init = f"task.init={tmp_path / 'exported'}"
    # A run that does not learn anything ends where it began.
    still = ("--set", init, "--set", "inner.lr=1e-30", "--set", "inner.weight_decay=0")
    short = ("--steps", "2", "--inner-steps", "2")
    assert swarm_ended(tmp_path / "second", *short, *quick, *still).returncode == 0
    assert loss_of(tmp_path / "second") == loss_of(tmp_path / "first")
    assert json.loads((tmp_path / "exported/murmuration.json").read_text())["step"] == 40


def test_adapters_are_trained_by_a_swarm_and_merged_on_the_way_out(tmp_path):
    task = (
        'task.name="huggingface"',
        'task.model={model_type="llama", vocab_size=256, hidden_size=16, intermediate_size=32, '
        "num_hidden_layers=2, num_attention_heads=2}",
        'task.lora={r=2, target_modules=["q_proj", "v_proj"]}',
        "task.context=16",
        "inner.lr=0.05",
    )
    settings = [part for each in task for part in ("--set", each)]
    quick = ("--workers", "2", "--steps", "20", "--inner-steps", "10")
    assert swarm_ended(tmp_path / "run", *quick, *settings).returncode == 0
    report = report_of(tmp_path / "run")
    assert report["hashes_agree"]
    assert report["params"] == 2 * 2 * (2 * 16 + 2 * 16)  # layers, matrices, both halves
    assert report["loss_unit"] == "nats per byte"
    told = printed("export", str(tmp_path / "run"), str(tmp_path / "out"))
    assert "Hugging Face's layout" in told
    assert difference(tmp_path / "run", tmp_path / "out") < 1e-5


def test_what_is_exported_is_the_first_values_moved_along_the_seeds(tmp_path):
    task = task_of(load_config(None, SMALL[1::2], "kseed"))
    first = {name: value + 0.01 for name, value in task.model().state_dict().items()}
    init = tmp_path / "init.safetensors"
    save_file(first, init)
    settings = [*SMALL, *settings_of(run__steps=12, diloco__inner_steps=6, inner__seeds=8)]
    own = settings_of(task__init=f'"{init}"', run__evaluate_every=5)
    with running_swarm(2, tmp_path / "run", "--preset", "kseed", *settings, *own) as swarm:
        swarm.start_all()
        swarm.wait()
        saved, _ = load(swarm.out / "w0" / "checkpoints")
    ((name, coefficients),) = saved.named("anchor").items()
    assert coefficients.shape == (8,)
    assert coefficients.count_nonzero() > 0
    path, _ = export(tmp_path / "run" / "w0", tmp_path / "exported", "safetensors")
    values = load_file(path)
    assert values.keys() == first.keys()
    assert name.startswith("seed_space_of_")
    for parameter, value in moved(task.model(), first, coefficients).items():
        assert torch.allclose(values[parameter], value, atol=1e-5)


def moved(
    model: torch.nn.Module, first: dict[str, torch.Tensor], coefficients: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The sum, seed by seed."""
    total = {name: first[name].clone() for name, _ in model.named_parameters()}
    for seed, coefficient in enumerate(coefficients):
        generator = torch.Generator().manual_seed(seed)
        for value in total.values():
            value += coefficient * torch.randn(value.shape, generator=generator)
    return total
