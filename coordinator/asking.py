"""Asks any worker or coordinator how the swarm is: one of them, or through it all that it knows."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from murmuration.coordinator import Failure
from murmuration.protos.addresses import split_relayed
from murmuration.protos.documents import STATUS_BYTES, BadDocument, unpack
from murmuration.protos.events import printable, text_of
from murmuration.protos.exit_codes import ExitCode
from murmuration.protos.figures import shown
from murmuration.protos.reach import (
    CHECK_ADDRESS,
    ENCRYPTED_RUN,
    Mismatch,
    UnknownName,
    mismatch,
    plain_cause,
    target_of,
)
from murmuration.worker.identity import is_encrypted_run
from murmuration.worker.views import PagePlace
from murmuration.worker.views.history import Look
from murmuration.worker.views.summary import LIVE, Document, maps_of, name_of

if TYPE_CHECKING:
    import grpc

    from murmuration.worker.identity import Identity
    from murmuration.worker.views.page import PageServer

TIMEOUT_S = 10.0
_PEER_S = 1.5  # for one peer's answer, once the first has come
_AT_ONCE = 16
_MAX_TEXT = 300  # characters that a peer has written
_TOLD_S = 0.05  # what took less was refused at once
_OPTIONS = (
    ("grpc.enable_http_proxy", 0),  # peers are reached directly
    ("grpc.enable_retries", 0),
    ("grpc.max_receive_message_length", 4 * 1024 * 1024),
)

Ask = Callable[[str, float], Document]


def ask(
    address: str,
    timeout_s: float = TIMEOUT_S,
    identity: "Identity | None" = None,
) -> dict[str, Any]:
    """The status document of the worker or coordinator that answers at `address`.

    Args:
        identity: of a member of the run; None where it is not encrypted.

    Raises:
        Failure: nobody answered in time, or not with a status; says what was tried.
    """
    import grpc

    from murmuration.protos import murmuration_pb2 as pb
    from murmuration.protos import murmuration_pb2_grpc as rpc

    began_s = time.monotonic()
    try:
        target = target_of(address)
    except UnknownName as error:
        raise Failure(
            f"{address} does not answer: {error}; {CHECK_ADDRESS}", ExitCode.UNREACHABLE
        ) from error
    with _channel(target, identity) as channel:
        try:
            reply = rpc.ControlStub(channel).Status(pb.StatusRequest(), timeout=timeout_s)
            return unpack(reply.document, STATUS_BYTES)
        except grpc.RpcError as error:
            waited_s = time.monotonic() - began_s
            raise _failed(address, error, waited_s, secure=identity is not None) from error
        except BadDocument as error:
            raise Failure(
                f"{address} answers, but not with a status: {error}", ExitCode.UNREACHABLE
            ) from error


def _channel(target: str, identity: "Identity | None") -> "grpc.Channel":
    import grpc

    if identity is None:
        return grpc.insecure_channel(target, options=_OPTIONS)
    credentials = grpc.ssl_channel_credentials(
        identity.authority, identity.key, identity.certificate
    )
    name = ("grpc.ssl_target_name_override", identity.server_name(None))
    return grpc.secure_channel(target, credentials, options=(*_OPTIONS, name))


def _failed(address: str, error: "grpc.RpcError", waited_s: float, *, secure: bool) -> Failure:
    """Says what a call that failed means."""
    if error.code().name == "UNIMPLEMENTED":
        return Failure(
            f"{address} answers, but is neither a worker nor a coordinator; is the port right?",
            ExitCode.UNREACHABLE,
        )
    details = printable(" ".join((error.details() or "").split()))
    why = mismatch(details, encrypts=secure)
    if why is not None:
        if why is Mismatch.NOT_ENCRYPTED:
            told = f"{address} does not encrypt: ask it without --run"
        elif secure:
            told = f"{address} is of another run than the folder that --run names"
        elif is_encrypted_run(address):
            told = f"{address}: {ENCRYPTED_RUN}"
        else:
            told = f"{address} closes the connection, and is no worker; is the port right?"
            return Failure(told, ExitCode.UNREACHABLE)
        return Failure(told, ExitCode.NOT_ADMITTED)
    waited = f" for {waited_s:.1f} s" if waited_s >= _TOLD_S else ""
    cause = shown(plain_cause(error.code().name, details), _MAX_TEXT)
    return Failure(
        f"{address} does not answer: tried Control/Status{waited} ({cause}); {CHECK_ADDRESS}",
        ExitCode.UNREACHABLE,
    )


class AskedSwarm:
    """All peers of a swarm: the one at `address` says who they are, and each is asked itself.

    Should the first one end, any other that it has named will do. Args: ask: as `ask`.
    """

    def __init__(self, address: str, ask: Ask = ask) -> None:
        self._address, self._ask = address, ask
        self._known: list[str] = []  # addresses of live peers

    def look(self) -> Look:
        """Asks each for its status now. Raises Failure: nobody answers."""
        first = self._first()
        live = [each for each in maps_of(first, "members") if text_of(each, "health") in LIVE]
        self._known = [text_of(each, "address") or "" for each in live]
        own = text_of(first, "peer")
        others = [each for each in live if text_of(each, "peer") != own]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            found = zip(map(name_of, others), pool.map(self._asked, others), strict=True)
            answers = {name: answer for name, answer in found if answer is not None}
        return Look(
            time.time(), first, answers if own is None else {name_of(first): first} | answers
        )

    def serve_page(self, place: PagePlace, *, encrypted: bool) -> "PageServer":
        """Serves the page until it is closed; it asks on a thread of its own.

        Args: encrypted: whether `place.folder` has a certificate to speak HTTPS with off loopback.

        Raises:
            Failure: it cannot listen there.
        """
        from murmuration.worker.views.page import PageServer

        def look() -> Look:
            try:
                return self.look()
            except Failure as error:
                raise TimeoutError(error.message) from error

        try:
            return PageServer(place, look, encrypted=encrypted)
        except OSError as error:
            raise Failure(str(error), ExitCode.ADDRESS_IN_USE) from error

    def _first(self) -> Document:
        """The status of the first that answers. Raises Failure: of the one asked for."""
        try:
            return self._ask(self._address, _PEER_S if self._known else TIMEOUT_S)
        except Failure:
            for address in self._known:
                try:
                    return self._ask(address, _PEER_S)
                except Failure:
                    continue
            raise

    def _asked(self, member: Document) -> Document | None:
        address = text_of(member, "address") or ""
        if split_relayed(address) is not None:  # a relay leads members to it, and not this command
            return None
        try:
            answer = self._ask(address, _PEER_S)
        except Failure:
            return None
        # Behind one address there may be another by now.
        return answer if text_of(answer, "peer") == text_of(member, "peer") else None
