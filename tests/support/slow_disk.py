"""`murmur` on a disk that a test makes slow while it runs.

    python -m tests.support.slow_disk FILE murmur's arguments...

As long as FILE is there, each fsync takes the seconds more that it holds.
"""

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from murmuration.worker.cli import main


def slowed(fsync: Callable[[int], None], told: Path) -> Callable[[int], None]:
    def slow(descriptor: int) -> None:
        with suppress(OSError):
            time.sleep(float(told.read_text()))
        fsync(descriptor)

    return slow


if __name__ == "__main__":
    _, told, *sys.argv[1:] = sys.argv
    os.fsync = slowed(os.fsync, Path(told))
    main()
