"""The interface of a transport, how traffic is counted, and how much callers may have under way.
`worker.errors` has the tree of its errors; what is Unreachable or Busy may be tried again."""

from collections import Counter
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from murmuration.protos.exit_codes import ExitCode
from murmuration.worker.errors import MurmurError

if TYPE_CHECKING:
    from murmuration.worker.identity.certificates import Identity


class Method(StrEnum):
    """A call (of Control) or a stream that peers serve, as gRPC names it."""

    ENROL = "Control/Enrol"
    JOIN = "Control/Join"
    GOSSIP = "Control/Gossip"
    INDIRECT_PROBE = "Control/IndirectProbe"
    STATUS = "Control/Status"
    MEASURE = "Control/Measure"
    RESULT = "Control/Result"
    FINISHED = "Control/Finished"
    LEASE = "Control/Lease"
    EXCHANGE = "Data/Exchange"
    AVERAGE = "Data/Average"
    PAIR_ROUND = "Data/PairRound"
    FETCH = "Data/Fetch"
    STAGE_CALL = "Data/StageCall"
    RESERVE = "Relay/Reserve"
    DIAL = "Relay/Dial"
    ACCEPT = "Relay/Accept"


CONTROL_METHODS = tuple(each for each in Method if each.startswith("Control/"))
# Each stream has a connection of its own: what it carries waits for nothing else.
RELAY_METHODS = tuple(each for each in Method if each.startswith("Relay/"))

# `murmur doctor` and `status`, and what peers measure links with: these train nothing.
PROBE_METHODS = (Method.STATUS, Method.MEASURE)

MAX_CONTROL_BYTES = 64 * 1024
MAX_DATA_BYTES = 4 * 1024 * 1024
WINDOW_BYTES = 512 * 1024  # of a stream that is not read; one that is read has 1 MiB more

_MOST_PEERS = 4096  # counted one by one
_GRPC_PREFIX_BYTES = 5
_HTTP2_FRAME_BYTES = 16 * 1024
_HTTP2_HEADER_BYTES = 9


class TransportError(MurmurError):
    """Bytes did not arrive. The message says where and why."""

    exit_code = ExitCode.UNREACHABLE


class Unreachable(TransportError):
    pass


class Untrusted(Unreachable):
    """One side does not take the other: its certificate at the handshake, or what it asks. Args:
    closed: the other side has closed the connection without a word of why."""

    def __init__(self, message: str, *, closed: bool = False) -> None:
        super().__init__(message)
        self.closed = closed


class Refused(TransportError):
    """A handler does not take what it was sent; the message says why, and goes to the caller."""


class Busy(Refused):
    pass


class AddressInUse(TransportError):
    """This process cannot listen there."""

    exit_code = ExitCode.ADDRESS_IN_USE


class Caller(NamedTuple):
    """Who calls."""

    address: str = ""  # the transport's own name of where it is from
    role: str = ""  # that its certificate says, and its name; empty where nothing is encrypted
    name: str = ""


NOBODY = Caller()


class Stream(Protocol):
    """One two-way stream of messages. io thread only."""

    async def send(self, message: bytes) -> None:
        """Returns when there is room for more. Raises Unreachable."""

    async def done(self) -> None:
        """Nothing more will be sent from this side. A served stream ends when its handler does."""

    async def receive(self) -> bytes | None:
        """The next message, None when the other side is done. Raises Unreachable."""

    def cancel(self) -> None:
        """Ends the stream at once, for both sides."""


class Handler(Protocol):
    """Answers other peers. io thread only."""

    def admit(self, method: str, caller: Caller) -> None:
        """Raises Refused: the caller may not ask for that; it is to take no place then."""

    async def on_call(self, method: str, request: bytes, caller: Caller) -> bytes:
        """Answers one call. Raises Refused."""

    async def on_stream(self, method: str, stream: Stream, caller: Caller) -> None:
        """Serves one stream; returning ends it. Raises Refused."""


class Transport(Protocol):
    """One peer's way to all others. io thread only.

    Where a `peer` is named, the certificate at the address must be of that name, if there are any;
    otherwise, of any peer of the run. `tunnel` gives HOST:PORT on this machine that leads to a peer
    which cannot be dialled; None: it can be."""

    tunnel: "Callable[[str], str | None]"

    @property
    def traffic(self) -> "Traffic": ...

    @property
    def encrypted(self) -> bool:
        """Tells whether peers prove who they are, and nobody else reads along."""

    async def listen(self, handler: Handler) -> str:
        """Starts serving; returns the address with the bound port. Raises AddressInUse."""

    async def call(
        self, address: str, method: str, request: bytes, timeout_s: float, peer: str | None = None
    ) -> bytes:
        """One small request and its answer. Raises Unreachable."""

    def open(self, address: str, method: str, peer: str | None = None) -> Stream: ...

    def connect(self, address: str, peer: str | None = None) -> None:
        """Begins to open the data connection that streams to this peer will use."""

    def drop(self, address: str) -> None:
        """Closes the connections to that address, so that the next call opens one."""

    def close_unneeded(self, needed: Container[str]) -> set[str]:
        """Closes idle connections to all other addresses; returns the addresses that are left."""

    def renew(self, security: "Identity") -> None:
        """New connections are made with this key and certificate; those that there are stay."""

    async def close(self) -> None: ...


class Traffic:
    """Bytes by method and direction, as they stand in the TCP stream below.

    A message costs its own bytes, gRPC's prefix of 5 and HTTP/2's 9 for each 16 KiB begun. What is
    not counted (HTTP/2 HEADERS of each call, window updates, TCP/IP headers) was measured at under
    0.1 % of a shard's exchange. Nor is TLS counted, which adds 22 bytes to each 16 KiB."""

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        # By peer, of the streams that this side has opened: the others count theirs.
        self.sent_to: Counter[str] = Counter()
        self.received_from: Counter[str] = Counter()

    @property
    def sent_bytes(self) -> int:
        """Without probes: these come from anywhere, so that no peer has the other half of them."""
        return self.sent.total() - self.probe_sent_bytes

    @property
    def received_bytes(self) -> int:
        return self.received.total() - self.probe_received_bytes

    @property
    def probe_sent_bytes(self) -> int:
        return sum(self.sent[method] for method in PROBE_METHODS)

    @property
    def probe_received_bytes(self) -> int:
        return sum(self.received[method] for method in PROBE_METHODS)

    def count_sent(self, method: str, message_bytes: int, peer: str | None = None) -> None:
        _count(self.sent, self.sent_to, method, message_bytes, peer)

    def count_received(self, method: str, message_bytes: int, peer: str | None = None) -> None:
        _count(self.received, self.received_from, method, message_bytes, peer)


def _count(
    by_method: Counter[str], by_peer: Counter[str], method: str, size: int, peer: str | None
) -> None:
    prefixed = size + _GRPC_PREFIX_BYTES
    framed = prefixed + _HTTP2_HEADER_BYTES * -(-prefixed // _HTTP2_FRAME_BYTES)
    by_method[method] += framed
    if peer is not None:
        if peer not in by_peer and len(by_peer) >= _MOST_PEERS:
            by_peer.clear()  # of peers that came and went; the others are counted again
        by_peer[peer] += framed


class Places:
    """Places for calls or streams (`what`). io thread only. A caller always has a `share` of them,
    and `each` at most. Of the `total` half goes by shares. Without a certificate all are alike."""

    def __init__(self, what: str, share: int, each: int, total: Callable[[], int]) -> None:
        self._what, self._share, self._each, self._total = what, share, each, total
        self._taken: Counter[tuple[str, str]] = Counter()

    @contextmanager
    def taken(self, caller: Caller) -> Iterator[None]:
        """Holds a place. Raises Busy: the caller has too many, or all of them have."""
        who, total = (caller.role, caller.name), self._total()
        if caller.role and self._taken[who] >= self._each:
            raise Busy(f"{caller.name} has {self._each} {self._what} here, and may have no more")
        if not caller.role:
            free = self._taken.total() < total
        else:
            beyond = sum(max(0, taken - self._share) for taken in self._taken.values())
            free = self._taken[who] < self._share or beyond < total // 2
        if not free:
            raise Busy(f"no place is free here: all of at most {total} {self._what} are under way")
        self._taken[who] += 1
        try:
            yield
        finally:
            self._taken[who] -= 1
            if not self._taken[who]:
                del self._taken[who]
