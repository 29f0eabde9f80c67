"""The examples in docs/examples, as people type them: two or three processes each."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import murmuration
from tests.support.workers import PATIENCE_S, free_addresses, wait_until_listens

EXAMPLES = Path(murmuration.__file__).parent / "docs/examples"


def run_peers(script: str, *options: str, peers: int = 2) -> list[str]:
    """What a first peer and those that join it print."""
    with started(script, options, *[options] * (peers - 1)) as processes:
        printed = [process.communicate(timeout=PATIENCE_S)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * peers, printed
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
            first = ("--listen", address, "--min-peers", str(len(each)))
            where = ("--name", f"w{number}", *(("--join", address) if number else first))
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-W", "ignore", str(EXAMPLES / script), *options, *where],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    env=os.environ | {"OMP_NUM_THREADS": "1"},  # three peers share the cores
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
        ("loop.py", ()),
        ("accelerate_loop.py", ("--steps", "20")),
        ("transformers_trainer.py", ("--steps", "20")),
        ("transformers_trainer.py", ("--steps", "20", "--lora")),
        ("lightning_module.py", ("--steps", "20")),
    ],
    ids=["own loop", "accelerate", "transformers", "lora", "lightning"],
)
def test_two_peers_end_with_one_model(script: str, options: tuple[str, ...]) -> None:
    printed = run_peers(script, *options)
    weights = [re.findall(r"weights (\S+)", text) for text in printed]
    assert weights[0] == weights[1] != []
    losses = [re.findall(r"^loss ([\d.]+)", text, re.MULTILINE) for text in printed]
    assert losses[0] != losses[1] or script == "lightning_module.py"  # samples of its own


def test_three_peers_train_a_gpt_with_two_optimizers() -> None:
    printed = run_peers("gpt.py", "--steps", "40", peers=3)
    ends = [re.findall(r"^loss ([\d.]+), weights (\S+)", text, re.MULTILINE) for text in printed]
    assert ends[0] == ends[1] == ends[2] != []
    assert float(ends[0][0][0]) < 5.0  # of 5.5 before the first step


def test_adapters_over_other_frozen_weights_are_refused() -> None:
    short = ("--steps", "20")
    with started("transformers_trainer.py", (*short, "--lora"), short) as processes:
        refused, _ = processes[1].communicate(timeout=PATIENCE_S)
    assert processes[1].returncode == 1
    assert "has other frozen parameters than this model" in refused


def test_the_loop_of_ones_own_is_changed_in_five_lines() -> None:
    before, after = (
        [line.strip() for line in (EXAMPLES / name).read_text().split('"""', 2)[2].splitlines()]
        for name in ("loop_before.py", "loop.py")
    )
    new = [line for line in after if line and line not in before]
    assert len(new) <= 5, new
    assert [line for line in before if line not in after and "batches = " not in line] == []
