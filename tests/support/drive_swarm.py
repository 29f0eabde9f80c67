"""Runs a swarm of fake workers in a process of its own, which a test can interrupt or kill.

python drive_swarm.py OUT [KEY=VALUE...]
"""

import sys
from pathlib import Path

from rich.console import Console

from murmuration.coordinator.launch import Launch
from murmuration.coordinator.supervisor import run_swarm
from murmuration.protos.exit_codes import MurmurError

if __name__ == "__main__":
    launch = Launch(
        workers=2,
        out=Path(sys.argv[1]),
        settings=tuple(sys.argv[2:]),
        program=(sys.executable, str(Path(__file__).with_name("fake_worker.py"))),
    )
    try:
        sys.exit(run_swarm(launch, Console(highlight=False))[0])
    except MurmurError as failure:
        print(f"murmur: {failure}", file=sys.stderr)
        sys.exit(failure.exit_code)
