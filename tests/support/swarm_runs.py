"""`murmur swarm` as a command, and its JSON report."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

Report = dict[str, Any]


def run_swarm(*args: str) -> Report:
    """Runs a local swarm to its end and returns its report. Raises SystemExit when it fails."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        command = [sys.executable, "-m", "worker.cli", "swarm"]
        out = ["--out", str(Path(folder) / "run"), "--json", str(path)]
        done = subprocess.run([*command, *out, *args], stdout=subprocess.PIPE, text=True)
        if done.returncode != 0:
            raise SystemExit(f"murmur swarm {' '.join(args)} exited with {done.returncode}")
        report: Report = json.loads(path.read_text())
    return report
