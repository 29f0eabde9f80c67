"""Every reader of bytes from elsewhere that is no method of a node: spoiled bytes end in its error.

Each is a name, valid samples, the function, and the errors that it documents.
"""

import time
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from cryptography.utils import CryptographyDeprecationWarning

from murmuration.algorithms.codecs import CODECS
from murmuration.coordinator.registry import Registry
from murmuration.coordinator.terminal import swarm_table
from murmuration.protos import murmuration_pb2 as pb
from murmuration.protos.documents import MANIFEST_BYTES, STATUS_BYTES, BadDocument, pack, unpack
from murmuration.worker import wire
from murmuration.worker.identity.authority import Authority
from murmuration.worker.identity.certificates import (
    Identity,
    IdentityError,
    Role,
    Verifier,
    new_key,
    request_for,
    requested_key,
)
from murmuration.worker.identity.gate import Expulsions
from murmuration.worker.identity.tokens import Token
from murmuration.worker.identity.words import SignedWords
from murmuration.worker.manifest import Manifest
from murmuration.worker.membership import Digest, Member
from murmuration.worker.pipeline.profile import Profile
from murmuration.worker.views.history import History, Look
from murmuration.worker.views.lines import SwarmLines
from murmuration.worker.wire.payloads import Payload, payload_messages
from tests.protocol.problem import Problem

ELEMENTS = 512


class Reader(NamedTuple):
    samples: Sequence[bytes]
    read: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]
    kind: type | None = None  # of a protobuf message


@cache
def _authority() -> Authority:
    folder = TemporaryDirectory(prefix="murmur-fuzz-")
    _folders.append(folder)
    return Authority.make(Path(folder.name))


_folders: list["TemporaryDirectory[str]"] = []  # as long as this process lives


def _without_warnings(read: Callable[..., object], *given: bytes) -> None:
    """Silences the library's warnings about what it reads although it should not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CryptographyDeprecationWarning)
        read(*given)


def _frame(raw: bytes) -> None:
    incoming = wire.Incoming(4 * ELEMENTS, 0)
    incoming.add(wire.parse(pb.ExchangeUp, raw).frame)


def _frames() -> list[bytes]:
    plain = memoryview(torch.arange(ELEMENTS, dtype=torch.float32).numpy().tobytes())
    payloads = (Payload.of(plain, compress=True, unit_bytes=4), Payload.of(plain))
    return [message for p in payloads for message, *_ in payload_messages(pb.ExchangeUp, p)]


def _introduce(raw: bytes) -> None:
    Registry().introduce(wire.parse(pb.IntroduceRequest, raw), 1.0)


def _introductions() -> list[bytes]:
    manifest = Problem().manifest.pack()
    member = pb.Member(peer="a", address="h:1", start_ms=1, step=3)
    return [pb.IntroduceRequest(member=member, manifest=manifest).SerializeToString()]


def _signed(authority: Authority, mine: Identity) -> dict[str, Reader]:
    """The readers of what members have signed, and the authority."""
    words, verifier = SignedWords(mine, 1, time.monotonic), Verifier(authority.certificate)
    expulsions = Expulsions(
        mine,
        None,
        expelled=lambda peer: None,
        keep=lambda entries: None,
        offload=None,  # of `run`
        log=lambda event: None,
    )
    member = words.signed(Member("a", "h:1", start_ms=1, digests=(Digest(1, 2, 3),)))
    authority.expel("a")
    entries = [entry.SerializeToString() for entry in authority.revocations()]
    return {
        "signed member": Reader(
            [wire.signed_member_to_message(member).SerializeToString()],
            lambda raw: words.read(wire.parse(pb.Member, raw)),
            (wire.WireError,),
            pb.Member,
        ),
        "a member's certificate": Reader(
            [mine.der], lambda raw: _without_warnings(verifier.certified, raw), (IdentityError,)
        ),
        "revocation": Reader(
            entries,
            lambda raw: expulsions.learn([wire.parse(pb.Revocation, raw)]),
            (wire.WireError,),
            pb.Revocation,
        ),
    }


def _status(raw: bytes) -> None:
    document, history = unpack(raw, STATUS_BYTES), History(2.0)
    history.add(Look(0.0, document, {"a": document}))
    swarm_table(history.summary())


def _readers() -> dict[str, Reader]:
    authority = _authority()
    mine, token = authority.new_identity(Role.PEER, "a"), str(authority.create_token()).encode()
    status = {"peer": "a", "step": 3, "members": [{"peer": "b"}], "traffic": {"bytes_sent": 3}}
    values = torch.linspace(-1, 1, ELEMENTS)
    readers = {
        "manifest": Reader([Problem().manifest.pack()], Manifest.unpack, (wire.WireError,)),
        "event": Reader(
            [
                pack({"event": "warning", "text": "x"}),
                pack({"event": "stalled", "round": 3, "waiting_for": ["b"], "seconds": 9.0}),
                pack({"event": "rebuilt", "stage": 1, "from": {"0": 0.5, "2": 0.5}}),
            ],
            lambda raw: SwarmLines().line(unpack(raw, MANIFEST_BYTES)),
            (BadDocument,),
        ),
        "status": Reader([pack(status)], _status, (BadDocument,)),
        "profile": Reader([Profile().pack()], Profile.unpack, ()),
        "introduction": Reader(
            _introductions(), _introduce, (wire.WireError,), pb.IntroduceRequest
        ),
        "frame": Reader(_frames(), _frame, (wire.WireError,), pb.ExchangeUp),
        "token": Reader(
            [token], lambda raw: Token.parse(raw.decode(errors="replace")), (IdentityError,)
        ),
        "request for a certificate": Reader(
            [request_for(new_key())],
            lambda raw: _without_warnings(requested_key, raw),
            (IdentityError,),
        ),
        "certificate": Reader(
            [mine.certificate],
            lambda raw: _without_warnings(Identity.of, mine.key, raw, mine.authority),
            (IdentityError,),
        ),
        **_signed(authority, mine),
    }
    for codec in CODECS:
        readers[f"codec {codec.name}"] = Reader(
            [bytes(wire.encode(codec, values))],
            lambda raw, codec=codec: wire.check_values(  # type: ignore[misc]  # bound in the loop
                codec, memoryview(bytearray(_sized(raw, codec))), ELEMENTS
            ),
            (wire.WireError,),
        )
    return readers


def _sized(raw: bytes, codec: object) -> bytes:
    """As long as was announced: others are refused before they are decoded."""
    size: int = codec.encoded_bytes(ELEMENTS)  # type: ignore[attr-defined]  # a Codec
    return raw[:size].ljust(size, b"\xff")


READERS = _readers()
