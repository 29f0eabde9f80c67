"""A disk that is full: a limit on the size of files stands in for it, which needs no rights."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.workers import WorkerProcess

_UNLIMITED = resource.RLIM_INFINITY


@contextmanager
def no_file_above(most_bytes: int) -> Iterator[None]:
    """For this process."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def fill_disk_of(worker: WorkerProcess) -> None:
    """From now on nothing that it writes has room."""
    resource.prlimit(worker.process.pid, resource.RLIMIT_FSIZE, (0, _UNLIMITED))


def make_room_for(worker: WorkerProcess) -> None:
    resource.prlimit(worker.process.pid, resource.RLIMIT_FSIZE, (_UNLIMITED, _UNLIMITED))
