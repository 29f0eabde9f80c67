from tests.support.threads import one_thread

__all__ = ["one_thread"]
