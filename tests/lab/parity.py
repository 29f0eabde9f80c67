"""Four real workers against the one-process reference, on the default model: hashes side by side.

python -m tests.lab parity [--steps 60] [--inner-steps 10] [--preset diloco] [--seed 0]
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from murmuration.worker.config import load_config
from tests.support.early_starts import AnchorPrefetch
from tests.support.reference import reference_hashes
from tests.support.workers import Hashes, report_of


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--inner-steps", type=int, default=10)
    parser.add_argument("--preset", default="diloco")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    settings = [
        f"run.steps={options.steps}",
        f"run.seed={options.seed}",
        f"diloco.inner_steps={options.inner_steps}",
    ]
    flags = [part for setting in settings for part in ("--set", setting)]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        words = ["swarm", "--preset", options.preset, "--out", str(out), *flags]
        command = [sys.executable, "-m", "murmuration.worker.cli", *words]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, stdout=sys.stderr, env=env)
        report, early_starts = report_of(out), AnchorPrefetch.of_run(out)
    peers = sorted(peer["peer"] for peer in report["peers"])
    wanted = reference_hashes(load_config(None, settings, options.preset), peers, early_starts)
    equal = True
    for peer in report["peers"]:
        seen, expected = Hashes.of(peer), wanted[peer["peer"]]
        equal &= seen == expected
        print(f"{peer['peer']:<4} anchor {seen.anchor}  momentum {seen.momentum}")
        print(f"ref. anchor {expected.anchor}  momentum {expected.momentum}")
    print("equal, bit for bit" if equal else "NOT EQUAL")
    return 0 if equal else 1


if __name__ == "__main__":
    raise SystemExit(main())
