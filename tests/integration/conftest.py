"""All integration tests of a process share one server that forks their workers."""

import pytest

from tests.support import fork_server


@pytest.fixture(scope="session", autouse=True)
def forking() -> None:
    fork_server.start()
