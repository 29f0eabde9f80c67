"""All integration tests share one server that forks their workers, those of other processes too."""

from tests.support import fork_server


def pytest_configure() -> None:
    """Before the processes of xdist begin, which find the server in their environment."""
    fork_server.start()
