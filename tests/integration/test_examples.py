"""The examples in docs/examples, as people type them: two processes each."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import murmuration
from tests.support.workers import PATIENCE_S, free_addresses

EXAMPLES = Path(murmuration.__file__).parent / "docs/examples"


def run_pair(script: str, *options: str, second: tuple[str, ...] | None = None) -> list[str]:
    """What the first peer and one that joins it print, and the code 1 of one that is refused."""
    (address,) = free_addresses(1)
    ends = [
        (*options, "--name", "w0", "--listen", address, "--min-peers", "2"),
        (*(options if second is None else second), "--name", "w1", "--join", address),
    ]
    peers = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(EXAMPLES / script), *each],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for each in ends
    ]
    try:
        if second is not None:
            refused, _ = peers[1].communicate(timeout=PATIENCE_S)
            assert peers[1].returncode == 1, refused
            return [refused]
        printed = [peer.communicate(timeout=PATIENCE_S)[0] for peer in peers]
        assert [peer.returncode for peer in peers] == [0, 0], printed
        return printed
    finally:
        for peer in peers:
            peer.kill()
            peer.communicate()


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("loop.py", ()),
        ("transformers_trainer.py", ("--steps", "20")),
        ("transformers_trainer.py", ("--steps", "20", "--lora")),
        ("lightning_module.py", ("--steps", "20")),
    ],
    ids=["own loop", "transformers", "lora", "lightning"],
)
def test_two_peers_end_with_one_model(script: str, options: tuple[str, ...]) -> None:
    printed = run_pair(script, *options)
    weights = [re.findall(r"weights (\S+)", text) for text in printed]
    assert weights[0] == weights[1] != []
    losses = [re.findall(r"^loss ([\d.]+)", text, re.MULTILINE) for text in printed]
    assert losses[0] != losses[1] or script == "lightning_module.py"  # samples of its own


def test_adapters_over_other_frozen_weights_are_refused() -> None:
    lora = ("--steps", "20", "--lora")
    (refused,) = run_pair("transformers_trainer.py", *lora, second=("--steps", "20"))
    assert "has other frozen parameters than this model" in refused


def test_the_loop_of_ones_own_is_changed_in_five_lines() -> None:
    before, after = (
        [line.strip() for line in (EXAMPLES / name).read_text().split('"""', 2)[2].splitlines()]
        for name in ("loop_before.py", "loop.py")
    )
    new = [line for line in after if line and line not in before]
    assert len(new) <= 5, new
    assert [line for line in before if line not in after and "batches = " not in line] == []
