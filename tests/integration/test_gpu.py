"""The checks for a card run on the CPU, so that the first call on one is not the script's first."""

import json
import subprocess
import sys
from pathlib import Path

# One of a kind: the others differ in what is passed to the same functions. Sites have test_site.py.
CHECKS = "swarm-fused swarm-graph codecs stages encode overlap-tiny-streaming losses-tiny-onebit"


def test_the_checks_for_a_card_hold_on_the_cpu(tmp_path: Path) -> None:
    results = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "tests.lab.gpu", "--device", "cpu", "--results", str(results)]
    done = subprocess.run(
        [*command, "--only", *CHECKS.split()], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = json.loads(results.read_text()).values()
    skipped = {name for name, figures in found.items() if figures["result"] == "skipped"}
    assert skipped == {"swarm-graphs", "swarm-graphed-step"}
    assert found["swarm-fused"]["skipped_steps"] == 1
    assert found["encode-e3m0"]["device_same_bytes"]
    again = subprocess.run([*command, "--only", "codecs"], capture_output=True, text=True)
    assert again.stdout.splitlines()[1:] == [f"1 of 1 hold; {results}"]
