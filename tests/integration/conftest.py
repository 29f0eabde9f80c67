"""All integration tests share one server that forks their workers, those of other processes too."""

import os

from tests.support import fork_server

os.environ["OMP_NUM_THREADS"] = "1"  # more would only wait for one another; torch is not loaded yet


def pytest_configure() -> None:
    """Before the processes of xdist begin, which find the server in their environment."""
    fork_server.start()
