"""Whether this machine has network namespaces for a test or a bench."""

from murmuration.algorithms.link import Link
from murmuration.coordinator.namespaces import Namespaces, NoNamespaces


def why_not() -> str | None:
    """Why namespaces cannot be made here, in one line; None when they can. Tries it."""
    try:
        with Namespaces(1, Link(rate_mbps=1)):
            return None
    except NoNamespaces as reason:
        return str(reason)
