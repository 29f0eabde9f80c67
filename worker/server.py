"""What a node answers to other peers: its calls and streams, by name of the method.

Whatever is wrong with what came ends that call and nothing else.
"""

import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress

from protos.events import Warnings
from protos.text import shown
from worker import wire
from worker.identity import Gate
from worker.transport import (
    NOBODY,
    Caller,
    Refused,
    Stream,
    TransportError,
    Unreachable,
)

_MAX_REASON = 200  # characters


class NodeServer:
    """The node's `Handler`. io thread only.

    Args:
        gate: what a caller's certificate is good for.
        refused: called for each message that cannot be what it says it is.
        warnings: take our own defects, each with its place in the code.

    Attributes:
        calls: what answers; some by the caller, and not by the message alone.
        streams: what serves.
    """

    def __init__(self, gate: Gate, refused: Callable[[], None], warnings: Warnings) -> None:
        self._gate, self._refused, self._warnings = gate, refused, warnings
        self.calls: dict[str, Callable[[bytes], Awaitable[bytes]]] = {}
        self.calls_by: dict[str, Callable[[bytes, Caller], Awaitable[bytes]]] = {
            "Control/Enrol": gate.enrol
        }
        self.streams: dict[str, Callable[[Stream], Awaitable[None]]] = {}

    async def on_call(self, method: str, request: bytes, caller: Caller = NOBODY) -> bytes:
        """Answers one control call. Raises Refused: whatever is wrong, it ends this call alone."""
        with self._ending_the_call(method):
            self._gate.check(method, request, caller)
            if (answer := self.calls.get(method)) is not None:
                return await answer(request)
            if (answer_to := self.calls_by.get(method)) is not None:
                return await answer_to(request, caller)
        raise Refused(f"no method {method}")

    async def on_stream(self, method: str, stream: Stream, caller: Caller = NOBODY) -> None:
        """Serves one data stream. Raises Refused, as `on_call`."""
        with suppress(Unreachable, TimeoutError), self._ending_the_call(method):
            if (serve := self.streams.get(method)) is not None:
                await serve(self._gate.checked(method, stream, caller))

    @contextmanager
    def _ending_the_call(self, method: str) -> Iterator[None]:
        """Raises Refused for what a peer has sent and cannot be, and for defects in dealing with
        it: these are told of as well."""
        try:
            yield
        except wire.WireError as error:
            self._refused()
            raise Refused(shown(str(error), _MAX_REASON)) from error
        except (TransportError, TimeoutError):
            raise
        except Exception as error:
            self.on_defect(method, error)
            raise Refused(f"{method} cannot be answered") from error

    def on_defect(self, where: str, error: Exception) -> None:
        """Warns of it, with the place in our code."""
        at = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{where}: {type(error).__name__} in {at.name}, line {at.lineno}"
        self._warnings.add(text, shown(str(error), _MAX_REASON))
