"""A run is exported, read by transformers, and gone on from by another run."""

import json
import re
import sys
from pathlib import Path

from tests.support.fork_server import MURMUR, run
from tests.support.swarm_runs import run_swarm
from tests.support.workers import PATIENCE_S, SMALL


def printed(*module_and_arguments: str) -> str:
    """What `python -m` prints with these."""
    done = run([sys.executable, "-m", *module_and_arguments], timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def murmur(*arguments: str) -> str:
    return printed("murmuration.worker.cli", *arguments)


def difference(run: Path, exported: Path) -> float:
    """The largest, of a logit as transformers computes it from one of the run's own model."""
    return float(printed("tests.support.logits", str(run), str(exported)))


def loss_of(run: Path) -> str:
    (found,) = re.findall(r"loss (\d+\.\d+)[^,]*, perplexity", murmur("evaluate", str(run)))
    return str(found)


def test_transformers_reads_it_and_another_run_begins_with_it(tmp_path: Path) -> None:
    quick = ("--workers", "2", *SMALL)
    run_swarm("--steps", "40", *quick, out=tmp_path / "first", program=MURMUR)
    told = murmur("export", str(tmp_path / "first"), str(tmp_path / "exported"))
    assert told.endswith("of step 40, Hugging Face's layout\n")
    assert difference(tmp_path / "first", tmp_path / "exported") < 1e-5
    init = f"task.init={tmp_path / 'exported'}"
    # A run that does not learn anything ends where it began.
    still = ("--set", init, "--set", "inner.lr=1e-30", "--set", "inner.weight_decay=0")
    short = ("--steps", "2", "--inner-steps", "2")
    run_swarm(*short, *quick, *still, out=tmp_path / "second", program=MURMUR)
    assert loss_of(tmp_path / "second") == loss_of(tmp_path / "first")
    source = json.loads((tmp_path / "exported/murmuration.json").read_text())
    assert source["step"] == 40


def test_adapters_are_trained_by_a_swarm_and_merged_on_the_way_out(tmp_path: Path) -> None:
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
    report = run_swarm(*quick, *settings, out=tmp_path / "run", program=MURMUR)
    assert report["hashes_agree"]
    assert report["params"] == 2 * 2 * (2 * 16 + 2 * 16)  # layers, matrices, both halves
    assert report["loss_unit"] == "nats per byte"
    told = murmur("export", str(tmp_path / "run"), str(tmp_path / "out"))
    assert "Hugging Face's layout" in told
    assert difference(tmp_path / "run", tmp_path / "out") < 1e-5
