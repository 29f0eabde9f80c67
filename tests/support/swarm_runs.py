"""`murmur swarm` as a command, and its JSON report."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.fork_server import MURMUR, ForkedPopen

Report = dict[str, Any]


def run_swarm(
    *args: str,
    out: Path | None = None,
    program: Sequence[str] = (sys.executable, "-m", "murmuration.worker.cli"),
) -> Report:
    """Runs a local swarm to its end and returns its report; what it prints goes to stderr.

    One torch thread a worker, so that runs with other numbers of workers compare.

    Args:
        args: of `murmur swarm`.
        out: where the run's folder goes; None removes it.
        program: that `murmur` is.

    Raises:
        SystemExit: it failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        command = [*program, "swarm"]
        where = ["--out", str(out or Path(folder) / "run"), "--json", str(path)]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        popen = ForkedPopen if program == MURMUR else subprocess.Popen
        with popen([*command, *where, *args], stdout=sys.stderr, env=env) as process:
            code = process.wait()
        if code != 0:
            raise SystemExit(f"murmur swarm {' '.join(args)} exited with {code}")
        report: Report = json.loads(path.read_text())
    return report
