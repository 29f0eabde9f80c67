"""What a caller may ask of a node by its certificate, and how a newcomer or a member gets one.

Where nothing is encrypted callers have no certificates, and anybody may ask for anything.
"""

from collections.abc import Callable, Iterable
from typing import NoReturn

from murmuration.protos import murmuration_pb2 as pb
from murmuration.protos.events import Warnings, new_event
from murmuration.protos.text import shown
from murmuration.worker import wire
from murmuration.worker.exchange.round_context import Offload
from murmuration.worker.identity import Authority, Role, enrol
from murmuration.worker.transport import Caller, Refused, Stream, Transport, TransportError

_MAX_REASON = 200  # characters
_ENROL = "Control/Enrol"
_MEMBERS = (Role.PEER, Role.COORDINATOR)
_RENEW_S = 5.0
_MOST_ASKED = 16  # for a later certificate, at one time


class Gate:
    """io thread only.

    Args:
        authority: of the run, if this peer holds its key.
        offload: where its files are read and written.
        refused: called for each call that is refused.
        revoked: whether what a caller proves itself by counts no more.
        key_of: fingerprint of the key that a member has, by its name.
        log: takes events.
    """

    def __init__(
        self,
        authority: Authority | None,
        *,
        offload: Offload,
        refused: Callable[[], None],
        revoked: Callable[[Caller], bool] = lambda caller: False,
        key_of: Callable[[str], str | None] = lambda peer: None,
        log: Callable[[dict[str, object]], None],
    ) -> None:
        self._authority, self._offload = authority, offload
        self._refused, self._revoked, self._log = refused, revoked, log
        self._key_of = key_of
        self._warnings = Warnings(log)

    def admit(self, method: str, caller: Caller) -> None:
        """Raises Refused: the caller was expelled, or holds a token and asks for more than a
        certificate."""
        if not caller.role:
            return
        if method != _ENROL and self._revoked(caller):  # whoever wants to be let in is told so
            self._refuse(f"{caller.role} {caller.name} was expelled")
        if caller.role not in ((Role.TOKEN, Role.PEER) if method == _ENROL else _MEMBERS):
            self._refuse(f"{method} is not for the certificate of a {caller.role}")

    def check(self, method: str, raw: bytes, caller: Caller) -> None:
        """Raises Refused: as `admit`, or the caller speaks for another peer."""
        self.admit(method, caller)
        if caller.role and (problem := _problem(method, raw, caller)) is not None:
            self._refuse(problem)

    def _refuse(self, problem: str) -> NoReturn:
        self._refused()
        raise Refused(shown(problem, _MAX_REASON))

    def checked(self, method: str, stream: Stream, caller: Caller) -> Stream:
        """The stream, whose first message is checked when it comes."""
        return _CheckedStream(stream, lambda raw: self.check(method, raw, caller))

    async def enrol(self, request: bytes, caller: Caller) -> bytes:
        """Signs a newcomer's certificate, or a member's later one, where this peer holds the run's
        key. Raises WireError."""
        asked, revoked = wire.parse(pb.EnrolRequest, request), self._revoked(caller)
        holder = self._key_of(asked.name)
        reply = await self._offload(
            lambda: enrol(
                self._authority, asked, caller.role, caller.name, holder=holder, revoked=revoked
            )
        )
        if caller.role == Role.TOKEN and self._authority is not None:
            if reply.refusal:
                self._warnings.add(f"not let in: {reply.refusal}")
            else:
                self._log(new_event("enrolled", name=asked.name, token=caller.name))
        return reply.SerializeToString()


class _CheckedStream:
    def __init__(self, stream: Stream, check: Callable[[bytes], None]) -> None:
        self._stream, self._check, self._checked = stream, check, False
        self.send, self.done, self.cancel = stream.send, stream.done, stream.cancel

    async def receive(self) -> bytes | None:
        message = await self._stream.receive()
        if message is not None and not self._checked:
            self._check(message)
            self._checked = True
        return message


def _problem(method: str, raw: bytes, caller: Caller) -> str | None:
    """Why the caller's certificate is not good for this message."""
    try:
        claimed = wire.claimed_sender(method, raw)
    except wire.WireError as error:
        return str(error)
    if claimed is not None and (caller.role, caller.name) != (Role.PEER, claimed):
        return f"the certificate of {caller.name} does not speak for {claimed}"
    return None


class KeyHolders:
    """Asks those that may hold the run's key, some at a time. io thread only.

    Args:
        transport: to the others.
        holders: addresses of those that may hold the key, the likeliest first.
    """

    def __init__(self, transport: Transport, holders: Callable[[], Iterable[str]]) -> None:
        self._transport, self._holders = transport, holders
        self._asked = 0

    async def ask(self, request: pb.EnrolRequest) -> bytes | None:
        """A later certificate (PEM); None: nobody has given it."""
        addresses = list(self._holders())
        for index in range(min(_MOST_ASKED, len(addresses))):
            address = addresses[(self._asked + index) % len(addresses)]
            try:
                raw = await self._transport.call(
                    address, "Control/Enrol", request.SerializeToString(), _RENEW_S
                )
                reply = wire.parse(pb.EnrolReply, raw)
            except (TransportError, wire.WireError):
                continue
            if not reply.refusal:
                return bytes(reply.certificate)
        self._asked += _MOST_ASKED
        return None
