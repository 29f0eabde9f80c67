"""A worker's network interface, and the bytes that it has sent."""

import fcntl
import socket
import struct
from pathlib import Path

_SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface
_COUNTERS = Path("/proc/net/dev")


def interface_of(address: str) -> str:
    """The interface of this network namespace that has an IPv4 address.

    Raises:
        ValueError: there is none."""
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


def sent_bytes(interface: str) -> int:
    """Since boot, link and IP headers included: the kernel's counter."""
    for line in _COUNTERS.read_text().splitlines():
        name, colon, rest = line.partition(":")
        if colon and name.strip() == interface:
            return int(rest.split()[8])
    raise ValueError(f"{_COUNTERS} has no interface {interface!r}")
