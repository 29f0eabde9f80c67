"""Who is asked for a later certificate: those that may hold the run's key, some at a time."""

from collections.abc import Callable, Iterable

from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker import wire
from murmuration.worker.transport import Transport, TransportError

_TRY_S = 5.0
_MOST_ASKED = 16  # at one time


class KeyHolders:
    """io thread only.

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
                    address, "Control/Enrol", request.SerializeToString(), _TRY_S
                )
                reply = wire.parse(pb.EnrolReply, raw)
            except (TransportError, wire.WireError):
                continue
            if not reply.refusal:
                return bytes(reply.certificate)
        self._asked += _MOST_ASKED
        return None
