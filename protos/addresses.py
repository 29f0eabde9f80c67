"""HOST:PORT, several of one peer, or PEER@HOST:PORT of a relay; and what a peer may be called."""

import ipaddress
from collections.abc import Sequence
from contextlib import suppress
from urllib.parse import unquote

from murmuration.protos.exit_codes import UsageError

LOOPBACK_HOST = "127.0.0.1"
_MAX_NAME_BYTES = 256


def check_name(name: str, error: type[Exception]) -> None:
    """Raises `error`: it is no name or address of a peer."""
    if not 0 < len(name.encode(errors="replace")) <= _MAX_NAME_BYTES or not name.isprintable():
        raise error(
            f"{name[:80]!r} is no name or address of a peer; take 1 to {_MAX_NAME_BYTES} bytes of "
            "text without line breaks"
        )


def check_address(address: str, peer: str) -> None:
    """Raises ValueError: others cannot dial the peer there, but a Unix socket or another peer."""
    if (split_relayed(address) or (peer,))[0] != peer:
        raise ValueError(f"{address!r} leads to another peer, or through a relay to a relay")
    for each in dialled(address):
        if "/" in split_address(each if ":" in each else f"{each}:0")[0]:
            raise ValueError(f"{each!r} is no HOST:PORT")


def split_address(address: str) -> tuple[str, int]:
    """Splits `HOST:PORT` or `[IPv6]:PORT`. Raises ValueError: a line that says what is wrong."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        ports = "; ports end at 65535" if host and port.isdecimal() else ""
        raise ValueError(f"{address!r} is no HOST:PORT, such as 192.0.2.7:7700{ports}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def checked_address(address: str, flag: str = "") -> tuple[str, int]:
    """As `split_address`. Raises UsageError, of `flag`."""
    try:
        return split_address(address)
    except ValueError as error:
        raise UsageError(f"{flag}{error}") from error


def served_at(said: str, given: str | int | None, such_as: int = 9464) -> str | None:
    """HOST:PORT to serve at; a port alone is one of loopback. Raises UsageError, of `said`."""
    if given is None:
        return None
    whole, is_port = str(given), str(given).isascii() and str(given).isdigit()
    try:
        return join_address(*split_address(f"{LOOPBACK_HOST}:{whole}" if is_port else whole))
    except ValueError as error:
        raise UsageError(
            f"{said}: write a port of this machine, up to 65535, such as {such_as}, or HOST:PORT "
            "where others are to read it"
        ) from error


def is_loopback(host: str) -> bool:
    """Tells whether only this machine reaches the host. Names but localhost count as no."""
    with suppress(ValueError):
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    return False


def is_wildcard(host: str) -> bool:
    """Tells whether a host is all addresses of a machine: 0.0.0.0 or ::, which nobody dials."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_unspecified
    return False


def join_address(host: str, port: int) -> str:
    """The inverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def alternatives(address: str) -> tuple[str, ...]:
    """Where a peer is dialled directly, in order: `192.0.2.7:7700,10.0.0.5:7700` are two."""
    direct = address.partition(";")[2] if "@" in address else address
    return tuple(direct.split(",")) if direct else ()


def dialled(address: str) -> tuple[str, ...]:
    """Each HOST:PORT of a peer's address: of relays, and of the peer."""
    _, relays = split_relayed(address) or ("", ())
    return *relays, *alternatives(address)


def public_address(address: str) -> str:
    """The one of a peer's addresses that is for all: the first, or that through its relays."""
    return address.partition(";" if "@" in address else ",")[0]


def with_port(address: str, bound: str) -> str:
    """The port of `bound` in the place of 0, in each of them."""
    parts = [split_address(each) for each in alternatives(address)]
    return ",".join(join_address(host, port or split_address(bound)[1]) for host, port in parts)


def relayed_address(peer: str, relays: Sequence[str], direct: str = "") -> str:
    """`w3@192.0.2.7:7700,192.0.2.8:7700`: where a peer is reached that only these relays reach;
    and `;10.0.0.5:7700`, where neighbours may."""
    return f"{peer}@{','.join(relays)}" + (f";{direct}" if direct else "")


def split_relayed(address: str) -> tuple[str, tuple[str, ...]] | None:
    """(the peer, its relays' addresses), the inverse of `relayed_address`; None of a direct one."""
    peer, at, relays = address.rpartition("@")
    return (peer, tuple(relays.partition(";")[0].split(","))) if at else None


def caller_host(peer: str) -> str:
    """The host, an IPv4 one as such, in gRPC's `ipv4:192.0.2.7:41000`; empty if it has none."""
    kind, _, address = unquote(peer).partition(":")
    with suppress(ValueError):
        if kind in ("ipv4", "ipv6"):
            host = ipaddress.ip_address(split_address(address)[0])
            mapped = host.ipv4_mapped if isinstance(host, ipaddress.IPv6Address) else None
            return str(mapped or host)
    return ""
