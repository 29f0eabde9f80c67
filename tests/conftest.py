"""The fixtures that all tests share. Nothing of theirs is kept in the user's home, and examples
that are drawn are the same each time."""

import gc
import os
import subprocess
import tempfile

import pytest
from hypothesis import HealthCheck, settings

from tests.support import fork_server

_state = tempfile.TemporaryDirectory(prefix="murmur-tests-")
os.environ["XDG_STATE_HOME"] = _state.name
# As the product has it before it loads gRPC, which some tests load first.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
os.environ["OMP_NUM_THREADS"] = "1"  # more would only wait for one another

# A collection looks at all that torch and gRPC have brought, and by default comes with each 700 new
# objects: a tenth of all that the tests compute.
gc.set_threshold(50_000, 20, 20)

# The same examples every time, and a slow machine fails nothing.
settings.register_profile(
    "steady",
    deadline=None,
    derandomize=True,
    max_examples=25,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("steady")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config):
    """Its workers are forked from a process that has imported torch and more; but not where it is
    measured which lines of the product run, for some run as they are imported."""
    if not config.pluginmanager.hasplugin("_cov"):
        fork_server.start()
        subprocess.Popen = fork_server.ForkedPopen
