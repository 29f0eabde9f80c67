"""Every experiment once, as small as it goes: whether it still runs, not what it finds.

    python -m tests.lab smoke [NAME ...]

An experiment may end with 0 or, where a run this small does not hold its claim, with 1; a traceback
or another exit code fails. What needs a program that is not there, or root, is skipped, and said.
"""

import argparse
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.lab.__main__ import experiments
from tests.support.namespaces import why_not

_PATIENCE_S = 900.0
# {out} is a folder that goes when the experiment has ended.
ARGUMENTS = {
    "bench": "--link 100mbit --preset diloco --peers torch-ddp --steps 40 --limit 20 "
    "--out {out}/runs",
    "exchange": "--mbytes 1 --rounds 2",
    "false-means": "--peers 4 --rounds 5 --seeds 1",
    "frontier": "--steps 12 --workers 2 --seeds 2 --lr 0.01 0.1 1 --outer 0.9,0.6 "
    "--line 'alone: local' --line 'DDP: ddp' --line 'onebit: onebit@2,1,2 diloco.inner_steps=6' "
    "--results {out}/results.jsonl --picture {out}/frontier.png",
    "goodput": "--minutes 1 --quiet-minutes 0.5 --inner-steps 10",
    "gpu": "--device cpu --results {out}/gpu.json",
    "hostile": "--seconds 1 --only ghosts",
    "nobody-waits": "--plan slow elastic --runs 1 --minutes 0.5 --quiet-minutes 0.1",
    "same-bits": "",
    "schedules": "pairs --schedules 5",
}
_OF_NAMESPACES = ("bench", "goodput", "nobody-waits")


def smoke(name: str) -> str:
    """Runs it; why it fails, or nothing."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = shlex.split(ARGUMENTS[name].format(out=folder))
        command = [sys.executable, "-m", "tests.lab", name, *arguments]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False
            )
        except subprocess.TimeoutExpired:
            return f"still runs after {_PATIENCE_S:g} s"
    said = (done.stdout + done.stderr).strip()
    if done.returncode in (0, 1) and "Traceback (most recent call last)" not in said:
        return ""
    return f"exit code {done.returncode}:\n{said[-2000:]}"


def main() -> int:
    """A line for each; 1 if one fails, or has no arguments here."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="these only")
    asked = parser.parse_args().names
    failed = [name for name in experiments() if name != "smoke" and name not in ARGUMENTS]
    for name in failed:
        print(f"{name:<18} has no arguments in {Path(__file__).name}")
    for name in asked or ARGUMENTS:
        if name in _OF_NAMESPACES and (lacking := why_not()):
            print(f"{name:<18} skipped: {lacking}", flush=True)
            continue
        began = time.monotonic()
        why = smoke(name)
        print(f"{name:<18} {time.monotonic() - began:6.1f} s  {why or 'runs'}", flush=True)
        failed += [name] if why else []
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
