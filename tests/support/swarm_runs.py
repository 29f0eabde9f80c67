"""`murmur swarm` as a command, and its JSON report."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

Report = dict[str, Any]


def run_swarm(*args: str) -> Report:
    """Runs a local swarm to its end and returns its report; what it prints goes to stderr.

    One torch thread a worker, so that runs with other numbers of workers compare.

    Raises:
        SystemExit: it failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        command = [sys.executable, "-m", "worker.cli", "swarm"]
        out = ["--out", str(Path(folder) / "run"), "--json", str(path)]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([*command, *out, *args], stdout=sys.stderr, env=env, check=False)
        if done.returncode != 0:
            raise SystemExit(f"murmur swarm {' '.join(args)} exited with {done.returncode}")
        report: Report = json.loads(path.read_text())
    return report
