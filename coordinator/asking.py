"""Asks any worker or coordinator how the swarm is: one of them, or through it all that it knows."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import grpc

from murmuration.protos import murmuration_pb2 as pb, murmuration_pb2_grpc as rpc, reach
from murmuration.protos.addresses import alternatives, split_relayed
from murmuration.protos.documents import STATUS_BYTES, BadDocument, unpack
from murmuration.protos.events import printable, text_of
from murmuration.protos.exit_codes import ExitCode, MurmurError
from murmuration.protos.figures import shown
from murmuration.worker.identity.certificates import Identity, is_encrypted_run
from murmuration.worker.views import ANSWER_S, ASKED_AT_ONCE, PagePlace
from murmuration.worker.views.history import Look
from murmuration.worker.views.summary import LIVE, Document, maps_of, name_of

if TYPE_CHECKING:
    from murmuration.worker.views.page import PageServer

TIMEOUT_S = 10.0
_MAX_TEXT = 300  # characters that a peer has written
_TOLD_S = 0.05  # what took less was refused at once
_OPTIONS = (
    ("grpc.enable_http_proxy", 0),  # peers are reached directly
    ("grpc.enable_retries", 0),
    ("grpc.max_receive_message_length", 4 * 1024 * 1024),
)

Ask = Callable[[str, float], Document]


def ask(
    address: str, timeout_s: float = TIMEOUT_S, identity: Identity | None = None
) -> dict[str, Any]:
    """The status of the worker or coordinator that answers at `address`. Raises MurmurError: none
    did in time, or it was no status. Args: identity: of a member, where the run is encrypted."""
    began_s = time.monotonic()
    try:
        target = asyncio.run(reach.find_target(address))
        if identity is None:
            channel = grpc.insecure_channel(target, options=_OPTIONS)
        else:
            pems = identity.authority, identity.key, identity.certificate
            name = ("grpc.ssl_target_name_override", identity.server_name(None))
            credentials = grpc.ssl_channel_credentials(*pems)
            channel = grpc.secure_channel(target, credentials, options=(*_OPTIONS, name))
        with channel:
            reply = rpc.ControlStub(channel).Status(pb.StatusRequest(), timeout=timeout_s)
            return unpack(reply.document, STATUS_BYTES)
    except reach.UnknownName as error:
        told = f"{address} does not answer: {error}; {reach.CHECK_ADDRESS}"
        raise MurmurError(told, ExitCode.UNREACHABLE) from error
    except grpc.RpcError as error:
        waited_s = time.monotonic() - began_s
        raise _failed(address, error, waited_s, secure=identity is not None) from error
    except BadDocument as error:
        told = f"{address} answers, but not with a status: {error}"
        raise MurmurError(told, ExitCode.UNREACHABLE) from error


def _failed(address: str, error: grpc.RpcError, waited_s: float, *, secure: bool) -> MurmurError:
    code, details = error.code().name, printable(" ".join((error.details() or "").split()))
    why, exit_code = reach.mismatch(details, encrypts=secure), ExitCode.UNREACHABLE
    if code == "UNIMPLEMENTED":
        told = "answers, but is neither a worker nor a coordinator; is the port right?"
    elif why is None:
        waited = f" for {waited_s:.1f} s" if waited_s >= _TOLD_S else ""
        cause = shown(reach.plain_cause(code, details), _MAX_TEXT)
        told = f"does not answer: tried Control/Status{waited} ({cause}); {reach.CHECK_ADDRESS}"
    elif why is not reach.Mismatch.NOT_ENCRYPTED and not secure and not is_encrypted_run(address):
        told = "closes the connection, and is no worker; is the port right?"
    else:
        exit_code = ExitCode.NOT_ADMITTED
        if why is reach.Mismatch.NOT_ENCRYPTED:
            told = "does not encrypt: ask it without --run"
        elif secure:
            told = "is of another run than the folder that --run names"
        else:
            return MurmurError(f"{address}: {reach.ENCRYPTED_RUN}", exit_code)
    return MurmurError(f"{address} {told}", exit_code)


class AskedSwarm:
    """All peers of a swarm: the one at `address` says who they are, and each is asked itself.
    Should the first one end, any other that it has named will do. Args: ask: as `ask`."""

    def __init__(self, address: str, ask: Ask = ask) -> None:
        self._address, self._ask = address, ask
        self._known: list[str] = []  # addresses of live peers

    def look(self) -> Look:
        """Asks each for its status now. Raises MurmurError: nobody answers."""
        first = self._first()
        live = [each for each in maps_of(first, "members") if text_of(each, "health") in LIVE]
        self._known = [text_of(each, "address") or "" for each in live]
        own = text_of(first, "peer")
        others = [each for each in live if text_of(each, "peer") != own]
        with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
            found = zip(map(name_of, others), pool.map(self._asked, others), strict=True)
            answers = {name: answer for name, answer in found if answer is not None}
        return Look(
            time.time(), first, answers if own is None else {name_of(first): first} | answers
        )

    def serve_page(self, place: PagePlace, *, encrypted: bool) -> "PageServer":
        """Serves the page until it is closed; it asks on a thread of its own. Raises MurmurError:
        it cannot listen. Args: encrypted: whether to speak HTTPS off loopback."""
        from murmuration.worker.views.page import PageServer

        def look() -> Look:
            try:
                return self.look()
            except MurmurError as error:
                raise TimeoutError(str(error)) from error

        try:
            return PageServer(place, look, encrypted=encrypted)
        except OSError as error:
            raise MurmurError(str(error), ExitCode.ADDRESS_IN_USE) from error

    def _first(self) -> Document:
        """The status of the first that answers. Raises MurmurError: of the one asked for."""
        try:
            return self._ask(self._address, ANSWER_S if self._known else TIMEOUT_S)
        except MurmurError:
            for address in self._known:
                with suppress(MurmurError):
                    return self._ask(address, ANSWER_S)
            raise

    def _asked(self, member: Document) -> Document | None:
        address = text_of(member, "address") or ""
        if split_relayed(address) is not None:  # a relay leads members to it, and not this command
            return None
        for each in alternatives(address):
            with suppress(MurmurError):
                answer = self._ask(each, ANSWER_S)
                if text_of(answer, "peer") == text_of(member, "peer"):  # it may be another's now
                    return answer
        return None
