"""The results of all peers, brought together at the end of a run: at every peer, by the peers.

A peer gives its result to all that live as soon as it has one. It stays until the others that are
done have given theirs, or until its time is up.
"""

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from murmuration.protos import murmuration_pb2 as pb
from murmuration.protos.documents import BadDocument, pack, unpack
from murmuration.worker import wire
from murmuration.worker.background import Component
from murmuration.worker.exchange.view import View
from murmuration.worker.membership import Member, Phase
from murmuration.worker.transport import Method, TransportError
from murmuration.worker.views.summary import Document

if TYPE_CHECKING:
    from murmuration.worker.node.node import Node

_RESULT_BYTES = 60 * 1024  # of one, packed: a control call takes not much more
_PLAIN_BYTES = 1024 * 1024
_MOST = 1024  # results, and peers that are remembered
_GIVE_S = 5.0
_TRIES = 3  # of giving it to one peer
_AGAIN_S = 0.5
_CURVES = ("train_loss_curve", "val_loss_curve")
_POINTS = 400  # of a curve


class ResultExchange(Component):
    """A component of the node. io thread only."""

    def __init__(self, me: str, run: int, host: "Node") -> None:
        self._me, self._run, self._host, self._clock = me, run, host, host.clock
        self._packed = b""
        self._results: dict[str, dict[str, Any]] = {}
        self._known: dict[str, Member] = {}
        self._tries: Counter[str] = Counter()
        self._giving: set[str] = set()
        self._again_s: defaultdict[str, float] = defaultdict(float)

    def on_view(self, view: View) -> None:
        """Membership has changed: a peer that goes is remembered as it was last. The result of one
        that has come back was of its earlier process."""
        for member in self._host.gossip.members:
            known = self._known.get(member.peer)
            if known is not None and known.start_ms != member.start_ms and member.peer != self._me:
                self._results.pop(member.peer, None)
                self._tries.pop(member.peer, None)
            if known is not None or len(self._known) < _MOST:
                self._known[member.peer] = member

    def tick(self) -> None:
        for member in self._to_give() if self._packed else ():
            if member.peer not in self._giving and self._clock() >= self._again_s[member.peer]:
                self._giving.add(member.peer)
                self._host.spawn(self._give(member))

    async def on_result(self, request: bytes) -> bytes:
        """Takes a peer's result, and gives this one's if there is one. Raises WireError."""
        given = wire.parse(pb.ResultRequest, request)
        if given.run != self._run:
            raise wire.WireError("a result of another run")
        self._take(given.sender, given.document)
        return pb.ResultReply(document=self._packed).SerializeToString()

    def share(self, result: Document) -> None:
        self._results[self._me] = dict(result)
        self._packed = _packed(result)

    def has(self, peer: str) -> bool:
        return peer in self._results

    def is_given(self) -> bool:
        """Tells whether each live peer has it, does not take it, or cannot be reached from here."""
        return not self._giving and not self._to_give()

    def is_complete(self) -> bool:
        """Tells whether, besides, all that are done have given theirs."""
        return self.is_given() and not any(
            member.phase is Phase.DONE and member.peer not in self._results
            for member in self._others()
        )

    def document(self) -> dict[str, object]:
        """Every peer that was heard of, with its last state and, if it is here, its result."""
        return {
            "run": f"{self._run:016x}",
            "reporter": self._me,
            "peers": [
                {
                    "peer": member.peer,
                    "address": member.address,
                    "stage": member.stage,
                    "step": member.step,
                    "state": (member.phase if member.live else member.health).name.lower(),
                    "result": self._results.get(peer),
                }
                for peer, member in sorted(self._known.items())
            ],
        }

    def _to_give(self) -> list[Member]:
        return [each for each in self._others() if self._tries[each.peer] < _TRIES]

    def _others(self) -> list[Member]:
        members = self._host.gossip.members
        mine = (each.unreachable for each in members if each.peer == self._me)
        left_out = {self._me}.union(*mine)
        return [each for each in members if each.live and each.peer not in left_out]

    async def _give(self, member: Member) -> None:
        self._tries[member.peer] += 1
        request = pb.ResultRequest(run=self._run, sender=self._me, document=self._packed)
        try:
            raw = await self._host.transport.call(
                member.address, Method.RESULT, request.SerializeToString(), _GIVE_S, member.peer
            )
            self._tries[member.peer] = _TRIES
            self._take(member.peer, wire.parse(pb.ResultReply, raw).document)
        except (TransportError, wire.WireError):  # it is tried again, or has gone
            self._again_s[member.peer] = self._clock() + _AGAIN_S
        finally:
            self._giving.discard(member.peer)

    def _take(self, peer: str, packed: bytes) -> None:
        if not packed or peer == self._me:
            return
        if len(packed) > _RESULT_BYTES:
            raise wire.WireError(f"a result of {len(packed)} bytes, at most {_RESULT_BYTES}")
        try:
            result = unpack(packed, _PLAIN_BYTES)
        except BadDocument as error:
            raise wire.WireError(f"a result: {error}") from error
        if peer in self._results or len(self._results) < _MOST:
            self._results[peer] = result


def _packed(result: Document) -> bytes:
    """Within the limit: with fewer points, and without what is too long."""
    short = dict(result)
    for key in short.keys() & set(_CURVES):
        curve = list(short[key] or ())
        stride = max(1, -(-len(curve) // _POINTS))
        short[key] = [*curve[:-1:stride], *curve[-1:]]
    for left_out in ("", "sample", *_CURVES):
        short.pop(left_out, None)
        if len(packed := pack(short)) <= _RESULT_BYTES:
            break
    return packed
