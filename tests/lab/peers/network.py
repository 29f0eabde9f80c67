"""A worker's network interface, and the bytes that went through it."""

import fcntl
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

_SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface
_COUNTERS = Path("/proc/net/dev")


def interface_of(address: str) -> str:
    """The interface of this network namespace that has an IPv4 address.

    Raises:
        ValueError: there is none.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                reply = fcntl.ioctl(probe, _SIOCGIFADDR, request)
            except OSError:
                continue  # it has no IPv4 address
            if socket.inet_ntoa(reply[20:24]) == address:
                return name
    raise ValueError(f"no interface here has the address {address}")


@dataclass(frozen=True)
class Traffic:
    """Bytes since boot that an interface sent and received, link and IP headers included."""

    sent: int
    received: int

    def __sub__(self, earlier: "Traffic") -> "Traffic":
        return Traffic(self.sent - earlier.sent, self.received - earlier.received)


def traffic_of(interface: str) -> Traffic:
    """The kernel's counters of one interface."""
    for line in _COUNTERS.read_text().splitlines():
        name, colon, rest = line.partition(":")
        if colon and name.strip() == interface:
            fields = rest.split()
            return Traffic(sent=int(fields[8]), received=int(fields[0]))
    raise ValueError(f"{_COUNTERS} has no interface {interface!r}")
