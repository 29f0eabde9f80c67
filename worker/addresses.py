"""At which host others reach this peer, where it listens on all addresses of its machine."""

import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass

from protos.addresses import is_loopback, is_wildcard, split_address
from protos.reach import resolved
from worker.errors import ConfigError

_ELSEWHERE = "198.51.100.1:9"  # of no machine (RFC 5737): what leads there is the default route


@dataclass(frozen=True)
class FoundHost:
    """Args:
    host: an address of this machine, or of what others dial to reach it.
    origin: how it was found, for the user.
    """

    host: str
    origin: str


def find_host(listen: str, contacts: Sequence[str], seen_from: str = "") -> FoundHost | None:
    """Finds the host to advertise where none was given.

    Args:
        listen: HOST:PORT that this peer listens on.
        contacts: HOST:PORT of peers that it is going to call.
        seen_from: the host that the first of them has seen this peer at; empty: not known.

    Returns:
        None where the host of `listen` is the one: it is no wildcard.

    Raises:
        ConfigError: loopback, but a contact is on another machine; or nothing was found.
    """
    host = split_address(listen)[0]
    sources = {contact: source_host(contact) for contact in contacts}
    if is_loopback(host):
        for contact, source in sources.items():
            if source and not is_loopback(source):
                raise ConfigError(
                    f"--listen {listen}: nobody but this machine can dial that, and {contact} is "
                    "another; say --listen 0.0.0.0:7700, or --advertise HOST:PORT where "
                    "something forwards to it"
                )
        return None
    if not is_wildcard(host):
        return None
    if seen_from and not is_loopback(seen_from):
        return FoundHost(seen_from, f"as {contacts[0]} sees it")
    for contact, source in sources.items():
        if source and not is_loopback(source):
            return FoundHost(source, f"the way to {contact}")
    own = list(_interface_hosts())
    route = source_host(_ELSEWHERE)
    if route is not None:
        also = [other for other in own if other != route]
        more = f"; it also has {', '.join(also)}" if also else ""
        return FoundHost(route, f"the default route{more}")
    if own:
        more = f"; it also has {', '.join(own[1:])}" if own[1:] else ""
        return FoundHost(own[0], f"the first interface, there is no default route{more}")
    raise ConfigError(
        f"--listen {listen}: this machine has no address that others could dial; say with "
        "--advertise HOST:PORT where they reach it"
    )


def source_host(address: str) -> str | None:
    """The address of this machine that the system would dial HOST:PORT from; None where it has no
    way there, or no such name is known. Nothing is sent to it."""
    host, port = split_address(address)
    for family, found in resolved(host):
        with suppress(OSError), closing(socket.socket(family, socket.SOCK_DGRAM)) as probe:
            probe.connect((found, port or 9))
            return str(probe.getsockname()[0])
    return None


def _interface_hosts() -> Iterator[str]:
    """IPv4 addresses of this machine that are not loopback."""
    found: list[str] = []
    if sys.platform == "linux":
        from pyroute2 import IPRoute

        with suppress(OSError), IPRoute() as here:
            found = [each.get_attr("IFA_ADDRESS") for each in here.get_addr(family=socket.AF_INET)]
    else:
        with suppress(OSError):
            found = socket.gethostbyname_ex(socket.gethostname())[2]
    yield from (host for host in found if not is_loopback(host))
