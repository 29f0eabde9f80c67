"""Signs what a peer says of itself: a peer that passes it on cannot change it (docs/adr/0018)."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice

from murmuration.protos import murmuration_pb2 as pb
from murmuration.protos.figures import shown
from murmuration.worker import wire
from murmuration.worker.identity import certificates
from murmuration.worker.identity.certificates import Identity, IdentityError, NotValidNow, Role
from murmuration.worker.membership import Health, Member, Signed
from murmuration.worker.membership.gossip import MOST_CERTIFICATES
from murmuration.worker.membership.swim import MAX_MEMBERS

_DOMAIN = b"murmuration member\0"
_MOST_WAITING_BYTES = 1024 * 1024
_MOST_BYTES = 12 * 1024  # of certificates in one message
_ASK_AGAIN_S = 1.0
_MOST_TRIES = 5


@dataclass
class _Waiting:
    message: pb.Member
    tries: int = 0
    asked_s: float | None = None


class SignedWords:
    """One peer's signatures, and its judgement of the others'. io thread only. Args: run: its
    number; tell: takes a line on each certificate that is not valid by this machine's date."""

    def __init__(
        self,
        identity: Identity,
        run: int,
        clock: Callable[[], float],
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._clock, self._tell = clock, tell
        self._prefix = _DOMAIN + run.to_bytes(8, "big")
        self._sign = certificates.signer(identity.key)
        self._verifier, self.certificate = certificates.Verifier(identity.authority), identity.der
        self._keys: dict[str, certificates.Certified] = {}
        self._mine: Member | None = None
        self._read: dict[str, Member] = {}  # the newest of each that was signed
        self._waiting: dict[str, _Waiting] = {}
        self._waiting_bytes = 0
        self.learn([self.certificate])

    def signed(self, me: Member) -> Member:
        if self._mine is None or _content(self._mine) != _content(me):
            words = wire.member_to_message(me).SerializeToString()
            self._mine = replace(me, signed=Signed(words, self._sign(self._digest(words))))
        return replace(me, signed=self._mine.signed)

    def renewed(self, identity: Identity) -> None:
        self.certificate = identity.der
        self.learn([self.certificate])

    def read(
        self, message: pb.Member, problem: Callable[[Member], str | None] = lambda member: None
    ) -> Member | None:
        """Reads a message about a member; None: its certificate has yet to come. The health is the
        sender's word, except for a departure, which is the peer's own.

        Args: problem: why a member cannot be: kept, its words would be newer than all that it can
        truly say. Raises WireError: it is not signed by its peer, or it cannot be."""
        if not message.signed:
            raise wire.WireError("its words are not signed; all peers must have one version")
        said = wire.member_from_message(wire.parse(pb.Member, message.signed))
        if message.peer not in ("", said.peer) or said.health not in (Health.ALIVE, Health.LEFT):
            raise wire.WireError("it is said to have signed what it would not")
        if (known := self._keys.get(said.peer)) is None:
            self._wait(said.peer, message)
            return None
        try:
            word = min(Health(message.health), Health.DEAD)  # a peer itself says that it has left
        except ValueError as error:
            raise wire.WireError(str(error)) from error
        newest, proof = self._read.get(said.peer), Signed(message.signed, message.signature)
        if newest is not None and (newest.signed == proof or _is_older(said, newest)):
            if (said.start_ms, said.incarnation) != (newest.start_ms, newest.incarnation):
                word = Health.ALIVE  # it was of an earlier life
        elif certificates.has_signed(known.key, message.signature, self._digest(message.signed)):
            if (wrong := problem(said)) is not None:
                raise wire.WireError(wrong)
            newest = self._read[said.peer] = replace(said, signed=proof)
        else:
            raise wire.WireError("its words are not signed by it")
        return newest if newest.health is Health.LEFT else replace(newest, health=word)

    def learn(self, given: Iterable[bytes]) -> list[pb.Member]:
        """Takes certificates, up to the first of another run. Returns members that have waited."""
        came: list[pb.Member] = []
        held = {each.certificate for each in self._keys.values()}
        for certificate in (each for each in dict.fromkeys(given) if each not in held):
            try:
                found = self._verifier.certified(certificate)
            except NotValidNow as error:
                self._tell(shown(str(error), 300))
                continue
            except IdentityError:
                break
            known = self._keys.get(found.name)
            if found.role is Role.PEER and (known is None or found.issued > known.issued):
                self._keys[found.name] = found
                if len(self._keys) > MAX_MEMBERS:  # the oldest after its own: asked for if need be
                    del self._keys[next(islice(self._keys, 1, None))]
            if (waiting := self._waiting.pop(found.name, None)) is not None:
                self._waiting_bytes -= waiting.message.ByteSize()
                came.append(waiting.message)
        return came

    def key_of(self, peer: str) -> str | None:
        known = self._keys.get(peer)
        return None if known is None else certificates.fingerprint(known.key)

    def certificates_of(self, peers: Sequence[str]) -> list[bytes]:
        """The certificates of these peers that are here, as many as one message takes."""
        known = filter(None, map(self._keys.get, peers[:MOST_CERTIFICATES]))
        found = [each.certificate for each in known]
        sizes = accumulate(map(len, found))
        return [each for each, size in zip(found, sizes, strict=True) if size <= _MOST_BYTES]

    def lacking(self) -> list[str]:
        """The peers whose certificates are to be asked for now."""
        now, due = self._clock(), []
        for peer, waiting in list(self._waiting.items()):
            if waiting.asked_s is not None and now < waiting.asked_s + _ASK_AGAIN_S:
                continue
            if waiting.tries >= _MOST_TRIES:  # nobody has it
                self._waiting_bytes -= self._waiting.pop(peer).message.ByteSize()
                continue
            waiting.tries, waiting.asked_s = waiting.tries + 1, now
            due.append(peer)
            if len(due) == MOST_CERTIFICATES:
                break
        return due

    def _wait(self, peer: str, message: pb.Member) -> None:
        before = self._waiting.get(peer)
        size = message.ByteSize() - (before.message.ByteSize() if before else 0)
        if self._waiting_bytes + size > _MOST_WAITING_BYTES:
            return
        self._waiting_bytes += size
        kept = pb.Member()
        kept.CopyFrom(message)  # a part of a message would keep all of it in memory
        self._waiting.setdefault(peer, _Waiting(kept)).message = kept

    def _digest(self, words: bytes) -> bytes:
        return hashlib.sha256(self._prefix + words).digest()


def _content(member: Member) -> Member:
    return replace(member, heartbeat=0, step=0, signed=None)


def _is_older(said: Member, known: Member) -> bool:
    """Tells whether nothing that is said can win over what is known: it need not be checked."""
    if said.start_ms != known.start_ms:
        return said.start_ms < known.start_ms
    newer = said.heartbeat > known.heartbeat or said.incarnation > known.incarnation
    return not newer and said.health is Health.ALIVE
