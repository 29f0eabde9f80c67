"""Why HOST:PORT is not reached, in words for users, and why nothing can listen there."""

import asyncio
import errno
import ipaddress
import socket
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from enum import StrEnum

from murmuration.protos.addresses import alternatives, join_address, split_address, split_relayed

LOOK_UP_S = 3.0  # a name server that does not answer holds a caller up for longer than a user waits
_GOOD_FOR_S = 10.0  # what a name server has said
_SILENT = "no name server answers"
HANDSHAKE_S = 3.0
# What is said of it to a joiner without a token, and to somebody that only asks.
GIVE_TOKEN = (
    "this run is encrypted; give a token with --token (`murmur token create` on a member makes one)"
)
ENCRYPTED_RUN = (
    "this run is encrypted; name the folder of a worker of it on this machine with --run DIR"
)
CHECK_ADDRESS = "check the address, that a worker runs there, and that its port is open"


def listening_problem(listen: str) -> OSError | None:
    """Why nothing can listen at HOST:PORT now; None where something can."""
    host, port = split_address(listen)
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((host, port))
    except OSError as error:
        return error
    return None


def cannot_listen(option: str, address: str, error: OSError | None) -> str:
    known = {
        errno.EADDRINUSE: "another process listens there",
        errno.EADDRNOTAVAIL: "that is no address of this machine",
        errno.EACCES: "this user may not listen on a port below 1024",
    }
    number = errno.EADDRINUSE if error is None else error.errno
    why = known.get(number or 0, str(error.strerror if error is not None else error))
    return (
        f"cannot listen on {address}: {why}; choose another with {option} HOST:PORT (port 0 takes "
        "a free one)"
    )


Places = tuple[tuple[socket.AddressFamily, str], ...]


class UnknownName(Exception):
    """No address is known for a name. The message is for the user, and has the name."""

    def __init__(self, host: str, why: str) -> None:
        super().__init__(f"no address is known for the name {host} ({why})")


_look_ups: dict[str, tuple[float, Future[Places]]] = {}  # by host: when it was asked
_lock = threading.Lock()


def _look_up(host: str, timeout_s: float) -> tuple[Future[Places], float]:
    """(the answer of this machine's resolver, the seconds left to wait for it). All that ask within
    ten seconds share one. It has a thread: the system may take half a minute to give up."""

    def ask(answer: Future[Places]) -> None:
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            places = dict.fromkeys((family, str(place[0])) for family, _, _, _, place in found)
            answer.set_result(tuple(places))
        except (OSError, ValueError) as error:
            said = (getattr(error, "strerror", None) or str(error)).lower()
            answer.set_exception(UnknownName(host, said))

    now = time.monotonic()
    with _lock:
        for each, (began_s, answer) in list(_look_ups.items()):
            if answer.done() and now > began_s + _GOOD_FOR_S:
                del _look_ups[each]
        if host not in _look_ups:
            answer = Future()
            answer.set_running_or_notify_cancel()
            _look_ups[host] = now, answer
            name = f"look up {host}"
            threading.Thread(target=ask, args=[answer], daemon=True, name=name).start()
        began_s, answer = _look_ups[host]
    return answer, max(0.0, began_s + timeout_s - now)


def resolved(host: str, timeout_s: float = LOOK_UP_S) -> Places:
    """(family, numeric host) of each address of a host. Blocks. Raises UnknownName."""
    answer, left_s = _look_up(host, timeout_s)
    try:
        return answer.result(left_s)
    except TimeoutError:
        raise UnknownName(host, _SILENT) from None


async def find_target(address: str, timeout_s: float = LOOK_UP_S) -> str:
    """How gRPC dials a peer: by all addresses of its hosts, 0.25 s apart, until one takes the
    handshake. Raises UnknownName: none is known."""
    asked = [(host, port, *_look_up(host, timeout_s)) for host, port in _to_look_up(address)]
    if not asked:
        return address
    answers = [asyncio.wrap_future(answer) for _, _, answer, _ in asked]
    with suppress(TimeoutError):
        async with asyncio.timeout(max(left for *_, left in asked)):
            await asyncio.gather(*answers, return_exceptions=True)
    return _target(asked)


def ways(address: str, tunnel: str | None) -> list[str]:
    """The addresses of a peer in the order in which they are tried, a tunnel to it last."""
    return [*alternatives(address), *filter(None, (tunnel,))] or [address]


def known_target(address: str) -> str:
    """As `find_target` without asking anybody: of several addresses those that are no names."""
    known = [(_family(host), host, port) for host, port in _to_look_up(address)]
    places = [(family, host, port) for family, host, port in known if family is not None]
    # `unix` may be a name, too.
    return _written(places) if places else f"{'dns:///' * bool(known)}{address.partition(',')[0]}"


def numeric(address: str) -> str:
    """HOST:PORT by an address of a name that takes a connection. Blocks. Raises UnknownName."""
    if not (named := _to_look_up(address)):
        return address
    host, port = named[0]
    with suppress(OSError), connected(host, port, HANDSHAKE_S) as there:
        return join_address(there.getpeername()[0], port)
    return join_address(resolved(host)[0][1], port)


def connected(host: str, port: int, timeout_s: float) -> socket.socket:
    """A connection to the first address of a host that takes one. Blocks for at most twice the
    time. Raises OSError, UnknownName."""
    places, why = resolved(host, timeout_s), OSError()
    for _, place in places:
        try:
            return socket.create_connection((place, port), timeout_s / len(places))
        except OSError as error:
            why = error
    raise why


def _to_look_up(address: str) -> list[tuple[str, int]]:
    """The host and port of each address, where gRPC does not dial it as it stands."""
    with suppress(ValueError):
        if split_relayed(address) is None:
            parts = [split_address(each) for each in alternatives(address)]
            return parts if len(parts) > 1 or _family(parts[0][0]) is None else []
    return []


def _family(host: str) -> socket.AddressFamily | None:
    """None of a name."""
    try:
        return socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
    except ValueError:
        return None


def _target(asked: list[tuple[str, int, Future[Places], float]]) -> str:
    found, problems = list[tuple[socket.AddressFamily, str, int]](), list[UnknownName]()
    for host, port, answer, _ in asked:
        try:
            found += [(family, place, port) for family, place in answer.result(0)]
        except TimeoutError:
            problems.append(UnknownName(host, _SILENT))
        except UnknownName as error:
            problems.append(error)
    if not found:
        raise problems[0]
    return _written(found)


def _written(places: list[tuple[socket.AddressFamily, str, int]]) -> str:
    """A target has addresses of one kind: beside IPv6, those of IPv4 are written as such too."""
    if all(family == socket.AF_INET for family, _, _ in places):
        return "ipv4:" + ",".join(f"{host}:{port}" for _, host, port in places)
    mapped = [(h if family == socket.AF_INET6 else f"::ffff:{h}", p) for family, h, p in places]
    return "ipv6:" + ",".join(f"[{host}]:{port}" for host, port in mapped)


class Mismatch(StrEnum):
    CLOSED = "it closes the connection: it may want a certificate, see --token"
    NOT_ENCRYPTED = (
        "this run is not encrypted: check the address, or join without a token, and with an --out "
        "that holds no certificate"
    )
    OTHER_NAME = "somebody else answers there: the certificate has another name"
    OTHER_RUN = (
        "its certificate is not of this run's authority, or not a peer's: check the address, "
        "--token and --out"
    )
    NOT_TAKEN = "it closes the connection: it does not take this certificate"

    @property
    def closed(self) -> bool:
        """Tells whether the connection was closed without a word of why."""
        return self in (Mismatch.CLOSED, Mismatch.NOT_TAKEN)


# What gRPC says of a handshake, by whether this side encrypts.
_HANDSHAKE = {
    False: {"Socket closed": Mismatch.CLOSED, "reset by peer": Mismatch.CLOSED},
    True: {
        "WRONG_VERSION_NUMBER": Mismatch.NOT_ENCRYPTED,
        "Hostname Verification": Mismatch.OTHER_NAME,
        "TSI_PROTOCOL_FAILURE": Mismatch.OTHER_RUN,
        "Socket closed": Mismatch.NOT_TAKEN,
        "reset by peer": Mismatch.NOT_TAKEN,
    },
}


def mismatch(details: str, *, encrypts: bool) -> Mismatch | None:
    """Says why a handshake failed, if known, by gRPC's `details`; `encrypts`: this side does."""
    if not details.startswith("failed to connect"):
        return None
    return next((why for part, why in _HANDSHAKE[encrypts].items() if part in details), None)


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
    """Why a call has failed. Args: code: the name of gRPC's status; details: gRPC's, or those of
    the peer that has ended the call, printable."""
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
