"""Why HOST:PORT is not reached, in words for users: names, handshakes, and what gRPC says; and why
nothing can listen there."""

import errno
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from enum import StrEnum
from typing import NamedTuple

from protos.addresses import split_address

LOOK_UP_S = 3.0  # a name server that does not answer holds a caller up for longer than a user waits
_GOOD_FOR_S = 10.0  # what a name server has said
_HANDSHAKE_S = 3.0
_ALPN = "h2"
# What is said of it to a joiner without a token, and to somebody that only asks.
GIVE_TOKEN = (
    "this run is encrypted; give a token with --token (`murmur token create` on a member makes one)"
)
ENCRYPTED_RUN = (
    "this run is encrypted; name the folder of a worker of it on this machine with --run DIR"
)
CHECK_ADDRESS = "check the address, that a worker runs there, and that its port is open"


# --------------------------------------------------------------------------------------- listening


def listening_problem(listen: str) -> OSError | None:
    """Why nothing can listen at HOST:PORT now; None where something can."""
    host, port = split_address(listen)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
        except OSError as error:
            return error
    return None


def cannot_listen(option: str, address: str, error: OSError | None) -> str:
    """A line for the user. Args: option: that says where to listen."""
    match error.errno if error is not None else errno.EADDRINUSE:
        case errno.EADDRINUSE:
            why = "another process listens there"
        case errno.EADDRNOTAVAIL:
            why = "that is no address of this machine"
        case errno.EACCES:
            why = "this user may not listen on a port below 1024"
        case _:
            why = str(error.strerror if error is not None else error)
    return (
        f"cannot listen on {address}: {why}; choose another with {option} HOST:PORT (port 0 takes "
        "a free one)"
    )


# ------------------------------------------------------------------------------------------- names


class Unresolved(NamedTuple):
    """No address is known for a name.

    Args:
        why: for the user, with the name.
        silent: no name server has answered, so that asking again takes as long.
    """

    why: str
    silent: bool


class _LookUp:
    """One question to the name servers, on a thread of its own; all that ask share its answer."""

    def __init__(self, host: str) -> None:
        self._host, self._began = host, time.monotonic()
        self._ended: float | None = None
        self._answered = threading.Event()
        self.found: tuple[tuple[socket.AddressFamily, str], ...] = ()
        self._problem = ""
        threading.Thread(target=self._ask, daemon=True, name=f"look up {host}").start()

    def wait(self, timeout_s: float) -> Unresolved | None:
        """None: it is found. Counted from when it was first asked."""
        self._answered.wait(max(0.0, self._began + timeout_s - time.monotonic()))
        silent = not self._answered.is_set()
        if self.found:
            return None
        said = "no name server answers" if silent else self._problem
        return Unresolved(f"no address is known for the name {self._host} ({said})", silent)

    @property
    def outdated(self) -> bool:
        return self._ended is not None and time.monotonic() > self._ended + _GOOD_FOR_S

    def _ask(self) -> None:
        try:
            places = socket.getaddrinfo(self._host, None, type=socket.SOCK_STREAM)
            self.found = tuple((family, str(place[0])) for family, _, _, _, place in places)
            self._problem = "" if self.found else "it has none"
        except (OSError, UnicodeError) as error:
            self._problem = (getattr(error, "strerror", None) or str(error)).lower()
        self._ended = time.monotonic()
        self._answered.set()


_look_ups: dict[str, _LookUp] = {}
_lock = threading.Lock()


def _look_up(host: str) -> _LookUp:
    with _lock:
        known = _look_ups.get(host)
        if known is None or known.outdated:
            for each in [each for each, old in _look_ups.items() if old.outdated]:
                del _look_ups[each]
            known = _look_ups[host] = _LookUp(host)
        return known


def resolved(
    host: str, timeout_s: float = LOOK_UP_S
) -> tuple[tuple[socket.AddressFamily, str], ...]:
    """(family, numeric host) of each address of a host; none where none is known in time."""
    known = _look_up(host)
    known.wait(timeout_s)
    return known.found


def unresolved(addresses: Iterable[str], timeout_s: float = LOOK_UP_S) -> dict[str, Unresolved]:
    """Those HOST:PORT whose host is a name that nobody knows. Blocks for at most `timeout_s`, once
    all together. Numbers are not asked for, nor what is no HOST:PORT.
    """
    asked = {}
    for address in addresses:
        with suppress(ValueError):
            host, _ = split_address(address)
            if not _is_number(host):
                asked[address] = _look_up(host)
    problems = ((address, look_up.wait(timeout_s)) for address, look_up in asked.items())
    return {address: problem for address, problem in problems if problem is not None}


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


# -------------------------------------------------------------------------------------- handshakes


class Mismatch(StrEnum):
    """What the two sides of a handshake do not agree about."""

    CLOSED = "it closes the connection: it may want a certificate, see --token"
    NOT_ENCRYPTED = (
        "this run is not encrypted: check the address, or join without a token, and with an --out "
        "that holds no certificate"
    )
    OTHER_NAME = "somebody else answers there: the certificate has another name"
    OTHER_RUN = "its certificate is not of this run's authority"
    NOT_TAKEN = "it closes the connection: it does not take this certificate"

    @property
    def closed(self) -> bool:
        """Whether the connection was closed without a word of why."""
        return self in (Mismatch.CLOSED, Mismatch.NOT_TAKEN)


# What gRPC says of a handshake, by whether this side encrypts.
_HANDSHAKE = {
    False: [("Socket closed", Mismatch.CLOSED), ("reset by peer", Mismatch.CLOSED)],
    True: [
        ("WRONG_VERSION_NUMBER", Mismatch.NOT_ENCRYPTED),
        ("Hostname Verification", Mismatch.OTHER_NAME),
        ("TSI_PROTOCOL_FAILURE", Mismatch.OTHER_RUN),
        ("Socket closed", Mismatch.NOT_TAKEN),
        ("reset by peer", Mismatch.NOT_TAKEN),
    ],
}


def mismatch(details: str, *, encrypts: bool) -> Mismatch | None:
    """What a handshake has failed for; None: nothing of the kind.

    Args:
        details: gRPC's, of a call that has failed.
        encrypts: whether this side does.
    """
    if not details.startswith("failed to connect"):
        return None
    return next((each for part, each in _HANDSHAKE[encrypts] if part in details), None)


def is_encrypted_run(address: str, timeout_s: float = _HANDSHAKE_S) -> bool:
    """Whether a member of an encrypted run answers at HOST:PORT: it shows a certificate of one.

    Nothing but that is asked, shown or believed: the certificate is not verified. Blocks for at
    most twice `timeout_s`.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols([_ALPN])
    with suppress(OSError, ValueError):
        with (
            socket.create_connection(split_address(address), timeout_s) as plain,
            context.wrap_socket(plain) as encrypted,
        ):
            shown = encrypted.getpeercert(binary_form=True)
        from protos.identity import is_of_a_run

        return shown is not None and is_of_a_run(shown)
    return False


# ------------------------------------------------------------------------------------ gRPC's words

_CAUSES = {
    "Connection refused": "connection refused",
    "No route to host": "no route to host",
    "Network is unreachable": "the network is unreachable",
    "errors resolving": "its name is not known",
    "DNS resolution failed": "its name is not known",
    "FD Shutdown": "no answer in time",
    "imed out": "no answer in time",
    "Socket closed": "the connection broke",
    "reset by peer": "the connection broke",
    "GOAWAY": "the connection was closed",
}


def plain_cause(code: str, details: str) -> str:
    """Why a call has failed, without gRPC's words where they are its own.

    Args:
        code: the name of gRPC's status.
        details: gRPC's, or those of whoever has ended the call, printable.
    """
    if code == "DEADLINE_EXCEEDED":
        return "no answer in time"
    code = code.lower().replace("_", " ")
    if code == "unavailable":
        for part, cause in _CAUSES.items():
            if part in details:
                return cause
        if details.startswith("failed to connect"):  # a chain of inner errors, the cause last
            details = details.rpartition(": ")[2]
    return f"{code} ({details})" if details and details.lower() != code else code
