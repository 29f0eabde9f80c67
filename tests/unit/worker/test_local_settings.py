"""Code is loaded and files are read if the user has named them, never on a peer's word."""

from typing import Any

import pytest

from murmuration.worker.config import load_config, to_document
from murmuration.worker.errors import ManifestRefused, UsageError
from murmuration.worker.node.admission import join_config
from murmuration.worker.tasks import OWN_LOOP, TaskError, least_bytes, local_settings
from murmuration.worker.tasks.huggingface import HuggingFace
from murmuration.worker.tasks.llama import MODELS, empty_llama
from murmuration.worker.training.checkpoint import Checkpoint, _mark, config_of

LLAMA = {"model_type": "llama", "hidden_size": 16, "hidden_act": "silu", "rope_theta": 1e4}


def run_of(*settings: str) -> dict[str, Any]:
    """The run-wide sections that a peer with these settings hands out."""
    return to_document(load_config(None, settings))


@pytest.mark.parametrize(
    ("named", "typing"),
    [
        ("task.name=torch.hub:load", "--set task.name=torch.hub:load"),
        ("task.text=/etc/passwd", "--set task.text=/etc/passwd"),
        ("inner.optimizer=os:system", "--set inner.optimizer=os:system"),
        ("task.text=x; rm -rf ~", "--set 'task.text=x; rm -rf ~'"),
    ],
)
def test_a_joiner_is_told_what_to_type(named, typing, tmp_path):
    run = run_of(named)
    with pytest.raises(TaskError, match="only others have named it") as refused:
        join_config(run, None, (), "host:1")
    assert str(refused.value).startswith("the run at host:1: [")
    assert str(refused.value).endswith(typing)
    join_config(run, None, (named,), "host:1")
    section, _, key = named.partition("=")[0].partition(".")
    file = tmp_path / "run.toml"
    file.write_text(f'[{section}]\n{key} = "{named.partition("=")[2]}"\n')
    join_config(run, file, (), "host:1")


def test_what_cannot_be_typed_is_not_shown(tmp_path):
    run = run_of()
    run["task"]["text"] = "\x1b[2J" + "a" * 5000
    with pytest.raises(TaskError) as refused:
        join_config(run, None, (), "host:1")
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 300
    assert str(refused.value).endswith("add --set task.text=...")


def test_initial_values_come_from_the_others_or_from_what_was_typed(tmp_path):
    elsewhere = run_of(f"task.init={tmp_path / 'nothing'}")
    assert join_config(elsewhere, None, (), "host:1").task.init
    run = run_of(f"task.init={tmp_path}")
    with pytest.raises(TaskError, match="to take the values from the others"):
        join_config(run, None, (), "host:1")
    assert join_config(run, None, ('task.init=""',), "host:1").task.init == ""
    typed = join_config(run, None, (f"task.init={tmp_path}",), "host:1")
    assert typed.task.init == str(tmp_path)


def test_a_section_that_is_none_is_refused_and_loops_of_their_own_load_nothing():
    with pytest.raises(ManifestRefused, match=r"without a section \[task\]"):
        join_config(run_of() | {"task": [1, 2]}, None, (), "host:1")
    assert join_config({}, None, ("diloco.overlap_steps=1",), "host:1").plan.overlap_steps == 1
    join_config(run_of(f"task.name={OWN_LOOP}", "inner.optimizer=os:system"), None, (), "host:1")


def test_of_a_checkpoint_only_its_task_may_be_said_otherwise(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    run = run_of("task.name=torch.hub:load", "task.repo=x", "inner.optimizer=os:system")
    theirs = Checkpoint(tmp_path, {}, {"manifest": run})
    own = Checkpoint(tmp_path, {}, {"manifest": run, "mark": _mark(run)})
    with pytest.raises(TaskError, match=r"add --set task\.name=torch\.hub:load$"):
        config_of(theirs)
    assert config_of(own).task.name == "torch.hub:load"
    config = config_of(theirs, ("task.name=torch.hub:load", "task.repo=y"))
    assert config.task.options == {"repo": "y"}
    with pytest.raises(UsageError, match="only settings of"):
        config_of(own, ("diloco.fragments=2",))


def test_what_a_model_of_transformers_could_load():
    for options, found in [
        ({"model": LLAMA}, ()),
        ({"model": LLAMA, "tokenizer": "bytes", "text": "stdlib"}, ()),
        ({"model": LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}}, ()),
        ({"model": LLAMA, "lora": {"r": 4, "target_modules": ["q_proj"]}}, ()),
        ({"model": "/models/x"}, ("model",)),
        ({"model": LLAMA, "tokenizer": "/models/x"}, ("tokenizer",)),
        ({"model": LLAMA | {"auto_map": {"AutoModelForCausalLM": "evil--m.M"}}}, ("model",)),
        ({"model": LLAMA | {"attn_implementation": "org/kernel"}}, ("model",)),
        ({"model": LLAMA, "lora": {"megatron_core": "evil", "megatron_config": {}}}, ("lora",)),
        ({"model": LLAMA, "text": "/etc/*"}, ("text",)),
    ]:
        assert HuggingFace.local_options(options) == found
        assert local_settings("huggingface", options) == found


def test_a_model_that_this_machine_cannot_hold_is_not_built_on_others_word():
    for task in [
        {"architecture": {"num_hidden_layers": 10**9}},
        {"architecture": {"hidden_size": 3_000_000}},
        {"context_bytes": 10**12},
        {"batch_size": 10**12},
        {"name": "huggingface", "model": {**LLAMA, "num_hidden_layers": 10**12}},
    ]:
        run = run_of()
        run["task"] |= task
        with pytest.raises(TaskError, match=r"training its model takes .*GB of memory at least"):
            join_config(run, None, (), "host:1")


@pytest.mark.parametrize("name", MODELS)
def test_what_a_model_takes_is_counted_without_it(name):
    config = MODELS[name]
    model = empty_llama(config)
    elements = sum(each.numel() for each in model.parameters())
    assert config.outer_elements + config.num_hidden_layers * config.layer_elements == elements
    assert 16 * elements < least_bytes("llama-bytes", {"model": name}, 1)
    assert least_bytes("llama-bytes", {"model": ["x"]}, 1) == 0
