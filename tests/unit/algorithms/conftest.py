from hypothesis import HealthCheck, settings

from tests.support.threads import one_thread

__all__ = ["one_thread"]

# The same examples every time, and no deadline: a slow machine fails nothing.
settings.register_profile(
    "steady",
    deadline=None,
    derandomize=True,
    max_examples=60,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("steady")
