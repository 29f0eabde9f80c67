"""Asks the worker's own code what it would refuse, before any worker is started.

In a process of its own: the rules are the worker's, and so is torch, which they need.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from coordinator.errors import Failure
from coordinator.rendezvous.records import int_of, text_of
from protos.exit_codes import ExitCode

PROGRAM = (sys.executable, "-m", "worker.cli.preflight")


def ask_worker(request: Mapping[str, Any], program: Sequence[str] = PROGRAM) -> dict[str, Any]:
    """The answer to a request; `worker.cli.preflight` says what is in either.

    Raises:
        Failure: with the line and the exit code that a worker would end with.
    """
    done = subprocess.run(
        program, input=json.dumps(request), capture_output=True, text=True, check=False
    )
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        answer = None
    if done.returncode != 0 or not isinstance(answer, dict):
        said = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise Failure(f"no worker can be started here: {said}", ExitCode.FAILED)
    if (refused := text_of(answer, "refused")) is not None:
        preset = text_of(answer, "preset")
        several = len(request["presets"]) > 1 and preset and not refused.startswith("--preset ")
        line = f"preset {preset}: {refused}" if several else refused
        raise Failure(line, int_of(answer, "exit_code") or ExitCode.FAILED)
    return answer
