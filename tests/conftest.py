"""What all tests share: nothing of theirs is kept in the home of whoever runs them, and examples
that are drawn are the same each time."""

import gc
import os
import tempfile

from hypothesis import HealthCheck, settings

_state = tempfile.TemporaryDirectory(prefix="murmur-tests-")
os.environ["XDG_STATE_HOME"] = _state.name
# As the product has it before it loads gRPC, which some tests load first.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
os.environ["OMP_NUM_THREADS"] = "1"  # more would only wait for one another; torch is not loaded yet

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
