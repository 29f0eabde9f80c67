"""A run is exported, read by transformers, and gone on from by another run."""

import json
import re
import subprocess
import sys
from pathlib import Path

from tests.support.swarm_runs import run_swarm
from tests.support.workers import SMALL

LOGITS = """
import sys, torch, transformers
from pathlib import Path
from worker.config import task_of
from worker.manifest import Manifest
from worker.training.evaluation import anchored_model, find_checkpoint

saved = find_checkpoint(Path(sys.argv[1]))
config = Manifest(saved.values["manifest"]).config("the run")
ours = anchored_model(saved, config, task_of(config)).eval()
theirs = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[2])
tokens = torch.randint(256, (4, 32), generator=torch.Generator().manual_seed(0))
with torch.inference_mode():
    print(float((ours(tokens) - theirs(tokens).logits).abs().max()))
"""


def murmur(*arguments: str) -> str:
    command = [sys.executable, "-m", "worker.cli", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def loss_of(run: Path) -> str:
    (found,) = re.findall(r"loss (\d+\.\d+), perplexity", murmur("evaluate", str(run)))
    return str(found)


def test_transformers_reads_it_and_another_run_begins_with_it(tmp_path: Path) -> None:
    quick = ("--workers", "2", *SMALL)
    run_swarm("--steps", "40", *quick, out=tmp_path / "first")
    told = murmur("export", str(tmp_path / "first"), str(tmp_path / "exported"))
    assert told.endswith("of step 40, Hugging Face's layout\n")
    command = [sys.executable, "-W", "ignore", "-c", LOGITS, str(tmp_path / "first")]
    command.append(str(tmp_path / "exported"))
    difference = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert float(difference) < 1e-5
    init = f"task.init={tmp_path / 'exported'}"
    # A run that does not learn anything ends where it began.
    still = ("--set", init, "--set", "inner.lr=1e-30", "--set", "inner.weight_decay=0")
    run_swarm("--steps", "2", "--inner-steps", "2", *quick, *still, out=tmp_path / "second")
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
    report = run_swarm(*quick, *settings, out=tmp_path / "run")
    assert report["hashes_agree"]
    assert report["params"] == 2 * 2 * (2 * 16 + 2 * 16)  # layers, matrices, both halves
    assert report["loss_unit"] == "nats per byte"
    told = murmur("export", str(tmp_path / "run"), str(tmp_path / "out"))
    assert "Hugging Face's layout" in told
    logits = LOGITS.replace("ours(tokens)", "ours(input_ids=tokens).logits")
    command = [sys.executable, "-W", "ignore", "-c", logits]
    command += [str(tmp_path / "run"), str(tmp_path / "out")]
    difference = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert float(difference) < 1e-5
