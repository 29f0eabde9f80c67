"""Where a peer serves, and at which host others reach it, where it listens on all addresses."""

import ipaddress
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

from murmuration.protos import addresses
from murmuration.protos.reach import Places, UnknownName, resolved
from murmuration.worker.errors import ConfigError, UsageError

# Of no machine (RFC 5737, RFC 3849): what leads there is the default route.
ROUTER = "router"  # what is advertised where the router is to open a port
_ELSEWHERE = ("198.51.100.1:9", "[2001:db8::1]:9")


class FoundHost(NamedTuple):
    host: str
    origin: str
    near: str = ""  # at which the same network dials it, behind NAT

    @property
    def advertised(self) -> str:
        """Port 0 stands for the one that is listened on."""
        return ",".join(addresses.join_address(each, 0) for each in (self.host, self.near) if each)


@dataclass(frozen=True)
class Addresses:
    """Where a peer serves, and how others reach it. Addresses are HOST:PORT."""

    listen: str = "127.0.0.1:0"
    # Others try these in order, with port 0 for the bound one; ROUTER: a port that it opens.
    advertise: str | None = None
    advertise_origin: str = ""  # how it was found where nobody gave it, for the user
    relayed: bool = True  # whether it may be reached through relays
    relay_mbps: float = 100.0  # 0: relays for nobody

    def check(self, others: Iterable[tuple[str, str | None]] = ()) -> None:
        """Raises UsageError: one of these, or of `others` by flag, cannot be dialled."""
        said = self.said.split(",") if self.said else []
        own = (("--listen ", self.listen), *(("--advertise ", each or ",") for each in said))
        for flag, address in (*own, *others):
            if "@" in (address or ""):
                raise UsageError(f"{flag}{address!r} is no HOST:PORT, but a relayed peer's")
            if address:
                addresses.checked_address(address, flag)
        if any(addresses.is_wildcard(addresses.split_address(each)[0]) for each in said):
            raise UsageError(
                f"--advertise {self.advertise}: nobody can dial that; name the host that others "
                "reach this peer at, or leave it out to have it found"
            )

    @property
    def said(self) -> str | None:
        return None if self.advertise == ROUTER else self.advertise

    @property
    def public(self) -> bool:
        own = (self.listen, *(addresses.alternatives(self.said) if self.said else ()))
        return not all(addresses.is_loopback(addresses.split_address(each)[0]) for each in own)

    def found(self, contacts: Sequence[str], seen_from: str = "") -> "Addresses":
        """Returns them with the host that `find_host` finds, where none was given."""
        found = None if self.advertise else find_host(self.listen, contacts, seen_from)
        if found is None:
            return self
        return replace(self, advertise=found.advertised, advertise_origin=found.origin)


def find_host(listen: str, contacts: Sequence[str], seen_from: str = "") -> FoundHost | None:
    """Finds the host to advertise; None: the host of `listen` is the one. Args: contacts: HOST:PORT
    of peers to be called; seen_from: where the first has seen it. Raises ConfigError: loopback, but
    a contact is on another machine; or nothing was found."""
    host = addresses.split_address(listen)[0]
    sources = {contact: source_host(contact) for contact in contacts}
    if addresses.is_loopback(host):
        for contact, source in sources.items():
            if source and not addresses.is_loopback(source):
                raise ConfigError(
                    f"--listen {listen}: nobody but this machine can dial that, and {contact} is "
                    "another; say --listen 0.0.0.0:7700, or --advertise HOST:PORT where "
                    "something forwards to it"
                )
        return None
    if not addresses.is_wildcard(host):
        return None
    if seen_from and _serves(host, seen_from):
        source = sources[contacts[0]]
        near = source if source and source != seen_from and _serves(host, source) else ""
        return FoundHost(seen_from, f"as {contacts[0]} sees it", near)
    for contact, source in sources.items():
        if source and _serves(host, source):
            return FoundHost(source, f"the way to {contact}")
    own = _first_public(each for each in _interface_hosts() if _serves(host, each))
    routes = filter(None, map(source_host, _ELSEWHERE))
    for route in _first_public(each for each in routes if _serves(host, each)):
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
    """This machine's address that HOST:PORT would be dialled from, if any. Nothing is sent."""
    host, port = addresses.split_address(address)
    places: Places = ()
    with suppress(UnknownName):
        places = resolved(host)
    for family, found in places:
        with suppress(OSError), closing(socket.socket(family, socket.SOCK_DGRAM)) as probe:
            probe.connect((found, port or 9))
            return str(probe.getsockname()[0])
    return None


def neighbours_dial(bound: str) -> str:
    """Where machines of the same network dial what is bound to HOST:PORT here; empty: nowhere."""
    with suppress(ValueError):
        host, port = addresses.split_address(bound)
        if addresses.is_wildcard(host):
            host = source_host(_ELSEWHERE[0]) or host
        if _serves(host, host) and not addresses.is_wildcard(host):
            return addresses.join_address(host, port)
    return ""


def _serves(wildcard: str, host: str) -> bool:
    """Tells whether a server on all addresses is reached at this one: 0.0.0.0 has IPv4 alone."""
    address = ipaddress.ip_address(host)
    local = address.is_loopback or address.is_link_local
    return not local and (address.version == 4 or ipaddress.ip_address(wildcard).version == 6)


def _first_public(hosts: Iterable[str]) -> list[str]:
    return sorted(hosts, key=lambda host: not ipaddress.ip_address(host).is_global)


def _interface_hosts() -> Iterator[str]:
    found: list[str] = []
    if sys.platform == "linux":
        from pyroute2 import IPRoute

        with suppress(OSError), IPRoute() as here:
            for family in (socket.AF_INET, socket.AF_INET6):
                own = here.get_addr(family=family)  # of a link of two, ADDRESS is the other end's
                found += [a.get_attr("IFA_LOCAL") or a.get_attr("IFA_ADDRESS") for a in own]
    else:
        with suppress(OSError):
            places = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
            found = sorted((str(place[0]) for *_, place in places), key=lambda host: ":" in host)
    yield from found
