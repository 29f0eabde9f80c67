"""Names and addresses that nobody else on this machine uses."""

import ipaddress
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

Network = ipaddress.IPv4Network

_NAME = "murmur"
# Set aside for measurements (RFC 2544), so seldom taken; then private ones.
_CANDIDATES = (Network("198.18.0.0/15"), Network("10.192.0.0/10"), Network("172.28.0.0/14"))
_PREFIX = 24
MOST_MEMBERS = 2 ** (32 - _PREFIX) - 4  # network, broadcast, host; the last is kept free


def free_subnet(routes: Iterable[Mapping[str, Any]]) -> Network | None:
    """A /24 that overlaps no route (as `ip -json route` tells them); None when all are taken."""
    taken = []
    for route in routes:
        destination = str(route.get("dst", ""))
        try:
            network = Network(destination, strict=False)
        except ValueError:  # "default", and what is no IPv4
            continue
        if network.prefixlen > 1:  # those are default routes cut in halves
            taken.append(network)
    for subnet in _subnets():
        if not any(subnet.overlaps(other) for other in taken):
            return subnet
    return None


def _subnets() -> Iterator[Network]:
    for candidate in _CANDIDATES:
        yield from candidate.subnets(new_prefix=_PREFIX)


def names(serial: int) -> tuple[str, str]:
    """(stem of namespace names, name of the host's interface): of this process, for its n-th use.

    The stem carries when the process was started, since a pid alone comes again.
    """
    pid = os.getpid()
    return f"{_NAME}-{pid}-{started(pid)}-{serial}", f"mm{pid}-{serial}"


def leftovers(namespaces: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(namespace, the host's interface) of those whose process is gone."""
    for name in namespaces:
        parts = name.split("-")
        if len(parts) != 5 or parts[0] != _NAME or not all(map(str.isdecimal, parts[1:4])):
            continue
        if started(int(parts[1])) != int(parts[2]):
            yield name, f"mm{parts[1]}-{parts[3]}"


def started(pid: int) -> int | None:
    """When a process was started, in clock ticks since the machine was; None when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[19])
