"""An exported model comes back, by the names that others know; what cannot be is one line."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from murmuration.worker.errors import CheckpointError, UsageError
from murmuration.worker.tasks import load_task
from murmuration.worker.training.checkpoint import Checkpoint
from murmuration.worker.training.evaluation import evaluating
from murmuration.worker.training.export import (
    anchored_model,
    distinct_tensors,
    export,
    load_initial,
)
from tests.support.saved_runs import own_task, save_run, tiny_llama, trained

OWN_TASK = """
import torch

class Numbers:
    def model(self):
        nn = torch.nn
        model = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2), nn.Linear(1, 2))
        model[2].weight = model[0].weight  # tied
        return model
    def batches(self, split, cursor): yield from ()
    def loss(self, model, batch): return model(batch.inputs)

def build(*, seed): return Numbers()
"""


def llama(folder: Path, run: str = "run") -> nn.Module:
    config = tiny_llama(folder)
    save_run(config, model := trained(config), folder / run / "checkpoints", step=5)
    return model


def test_a_model_with_a_class_in_transformers_is_laid_out_for_it(tmp_path):
    model = llama(tmp_path)
    path, what = export(tmp_path / "run", tmp_path / "out", None)
    held = sum(p.numel() for p in model.parameters())
    assert what == f"{held:,} parameters of step 5, Hugging Face's layout"
    assert (tmp_path / "out/config.json").exists()
    assert path.stat().st_mode == (tmp_path / "out/config.json").stat().st_mode
    tensors = load_file(path)
    assert "model.layers.0.self_attn.q_proj.weight" in tensors
    for name, value in model.state_dict().items():
        assert torch.equal(tensors[name], value), name
    with pytest.raises(UsageError, match=r"cannot be written: .*; choose another folder"):
        export(tmp_path / "run", path, None)
    path.unlink()
    path.mkdir()
    for _ in range(2):  # what has failed halfway may be tried again
        with pytest.raises(UsageError, match=r"cannot be written"):
            export(tmp_path / "run", tmp_path / "out", None)


def test_any_other_model_is_tensors_by_name(tmp_path, monkeypatch):
    config = own_task(OWN_TASK, tmp_path, monkeypatch)
    save_run(config, model := trained(config), tmp_path / "run")
    path, what = export(tmp_path / "run", tmp_path / "out", None)
    assert what.endswith("tensors alone")
    assert not (tmp_path / "out/config.json").exists()
    again = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2), nn.Linear(1, 2))
    again.load_state_dict(load_file(path))
    assert torch.equal(again[0].weight, model[0].weight)
    with pytest.raises(UsageError, match=r"--to hf: the task 'task_in_.*:build' has no"):
        export(tmp_path / "run", tmp_path / "out", "hf")
    (tmp_path / "out/murmuration.json").rename(tmp_path / "elsewhere.json")
    with pytest.raises(UsageError, match=r"out holds a model that is no export: choose another"):
        export(tmp_path / "run", tmp_path / "out", None)


@pytest.mark.parametrize("source", ["out", "out/model.safetensors", "run"])
def test_a_run_begins_where_another_has_ended(tmp_path, source):
    model = llama(tmp_path)
    export(tmp_path / "run", tmp_path / "out", None)
    task = load_task("llama-bytes", seed=0, options=tiny_llama(tmp_path).task.options)
    again = task.model()
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.zero_()
    values = dict(again.named_parameters())
    load_initial(again, tmp_path / source, task)
    for name, parameter in model.named_parameters():
        assert torch.equal(values[name], parameter), name


def test_first_values_of_another_model_are_refused(tmp_path):
    save_file({"0.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    model, task = nn.Sequential(nn.Linear(1, 2)), load_task("llama-bytes", seed=0)
    with pytest.raises(CheckpointError, match=r"0\.weight is of shape \(3,\), wanted \(2, 1\)"):
        load_initial(model, tmp_path, task)
    with pytest.raises(CheckpointError, match="no such file or folder"):
        load_initial(model, tmp_path / "nowhere", task)
    save_file({"0.weight": torch.zeros(2, 1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"0\.bias is missing"):
        load_initial(model, tmp_path, task)
    (tmp_path / "model.safetensors").write_text("no tensors")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_initial(model, tmp_path, task)


def test_a_compiled_model_is_stored_and_read_by_its_bare_names(tmp_path):
    plain = [nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2)) for _ in range(2)]
    model, other = (torch.compile(each, backend="eager") for each in plain)
    for each in plain:
        each[0].weight.requires_grad_(False)
    with torch.no_grad():
        model.state_dict()["_orig_mod.1.running_mean"].fill_(3.0)
    tensors = distinct_tensors(model)
    assert {"0.weight", "1.running_mean"} < tensors.keys()
    assert not any("_orig_mod" in name for name in tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    load_initial(other, tmp_path, load_task("llama-bytes", seed=0, options={}))
    for ours, theirs in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("preset", ["diloco", "local"])
def test_what_is_read_of_a_checkpoint_is_the_anchor_or_where_there_is_none_the_peers_own(
    tmp_path, preset
):
    config = tiny_llama(tmp_path, f"diloco.preset={preset}")
    task = load_task("llama-bytes", seed=0, options=config.task.options)
    named = {name: p.detach() for name, p in trained(config).named_parameters()}
    first = dict(task.model().named_parameters())
    kinds = {"anchor": first, "local": named}
    tensors = {f"{kind}/{name}": p for kind, values in kinds.items() for name, p in values.items()}
    found = anchored_model(Checkpoint(tmp_path, tensors, {}), config, task)
    for name, value in found.named_parameters():
        assert torch.equal(value, (first if preset == "diloco" else named)[name])


def test_tied_weights_are_stored_once():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    model[1].weight = model[0].weight
    assert list(distinct_tensors(model)) == ["0.weight"]


def test_evaluation_turns_dropout_off_and_leaves_each_module_as_it_was():
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 2))
    model[1].eval()
    with evaluating(model):
        assert not any(each.training for each in model.modules())
    assert [each.training for each in model.modules()] == [True, True, False]
