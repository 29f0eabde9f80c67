"""The examples in docs/examples: two or three processes each."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.support.fork_server import EXAMPLES, ForkedPopen
from tests.support.workers import PATIENCE_S, free_addresses, wait_until_listens

STORY = "the flock turns as one , and no bird leads ."


def printed_by(script: str, *each: tuple[str, ...]) -> list[str]:
    """The lines that a first peer and those that join it print, each with its options."""
    with started(script, *each) as processes:
        printed = [process.communicate(timeout=PATIENCE_S)[0] for process in processes]
    assert {process.returncode for process in processes} == {0}, printed
    return printed


@contextmanager
def started(script: str, *each: tuple[str, ...]) -> Iterator[list[subprocess.Popen[str]]]:
    """A process of the example for each of these options; the others join the first."""
    (address,) = free_addresses(1)
    processes: list[subprocess.Popen[str]] = []
    try:
        for number, options in enumerate(each):
            if number == 1:
                wait_until_listens(address)
            begins = ("--listen", address, "--min-peers", str(len(each)))
            where = ("--name", f"w{number}", *(("--join", address) if number else begins))
            # One ends as an interpreter does: what is forked ends before modules are cleared.
            spawned = script == "loop.py" and not number
            processes.append(
                (subprocess.Popen if spawned else ForkedPopen)(
                    [sys.executable, str(EXAMPLES / script), *options, *where],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},  # threads of several would spin
                )
            )
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("loop.py", ("--steps", "20")),
        ("accelerate_loop.py", ("--steps", "20")),
        ("transformers_trainer.py", ("--steps", "20", "--lora")),
        ("lightning_module.py", ("--steps", "20")),
    ],
    ids=["own loop", "accelerate", "lora", "lightning"],
)
def test_two_peers_end_with_one_model(script, options):
    printed = printed_by(script, options, options)
    assert not re.search("Traceback|Exception ignored", printed[0]), printed[0]
    weights = [re.findall(r"weights (\S+)", text) for text in printed]
    assert weights[0] == weights[1] != []
    losses = [re.findall(r"^loss ([\d.]+)", text, re.MULTILINE) for text in printed]
    assert losses[0] != losses[1] or script == "lightning_module.py"  # samples of its own


def test_a_checkpoint_of_ones_own_is_fine_tuned_and_can_be_loaded_again(tmp_path):
    base, text = tiny_checkpoint(tmp_path / "base"), tmp_path / "story.txt"
    text.write_text(f"{STORY} " * 40)
    given = (str(base), str(text), "--lora", "--steps", "12", "--inner-steps", "6")
    small = ("--context", "16", "--batch", "2", "--accumulate", "2", "--lr", "0.05")
    saves = [tmp_path / "one", tmp_path / "two"]
    printed_by("finetune.py", *((*given, *small, "--save", str(save)) for save in saves))
    found = [transformers.AutoModelForCausalLM.from_pretrained(each) for each in (base, *saves)]
    before, one, two = (model.state_dict() for model in found)
    assert all(torch.equal(value, two[name]) for name, value in one.items())
    changed = {name for name, value in one.items() if not torch.equal(value, before[name])}
    assert changed == {name for name in one if "q_proj" in name or "v_proj" in name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(saves[0])
    tokens = tokenizer("the flock turns as one", return_tensors="pt").input_ids
    with torch.inference_mode():
        losses = [model(input_ids=tokens, labels=tokens).loss.item() for model in found]
    assert losses[1] == losses[2] < losses[0]


def tiny_checkpoint(folder: Path) -> Path:
    """A model of transformers with its tokenizer, as people have them."""
    words = ["?", "<end>", *STORY.split()]
    made = Tokenizer(models.WordLevel({w: n for n, w in enumerate(words)}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="?", eos_token="<end>"
    )
    wrapped.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_three_peers_train_a_gpt_with_two_optimizers():
    printed = printed_by("gpt.py", *[("--steps", "40")] * 3)
    ends = [re.findall(r"^loss ([\d.]+), weights (\S+)", text, re.MULTILINE) for text in printed]
    assert ends[0] == ends[1] == ends[2] != []
    assert float(ends[0][0][0]) < 5.0  # of 5.5 before the first step


def test_adapters_over_other_frozen_weights_are_refused():
    short = ("--steps", "20")
    with started("transformers_trainer.py", (*short, "--lora"), short) as processes:
        refused, _ = processes[1].communicate(timeout=PATIENCE_S)
    assert processes[1].returncode == 1
    assert "has other frozen parameters than this model" in refused


def test_the_loop_of_ones_own_is_changed_in_six_lines():
    before, after = (
        [line.strip() for line in (EXAMPLES / name).read_text().split('"""', 2)[2].splitlines()]
        for name in ("loop_before.py", "loop.py")
    )
    new = [line for line in after if line and line not in before]
    assert len(new) <= 6, new
    changed = ("batches = ", "in range(options.steps)")
    gone = [line for line in before if line not in after]
    assert [line for line in gone if not any(each in line for each in changed)] == []
