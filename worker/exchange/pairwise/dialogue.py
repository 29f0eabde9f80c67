"""The dialogue of pair rounds: who is admitted, who says what when, and what a stream's end means.

A partner that calls is admitted to the very round and group that it names; it waits until this peer
has come there. A peer for which a round has succeeded keeps what it sent, and repeats it.
"""

from abc import ABC, abstractmethod

from worker.exchange.pairwise.prefetch import ArrivalSkew
from worker.exchange.pairwise.round import (
    Event,
    PartnerCame,
    PartnerComplete,
    PartnerDeclined,
    PartnerHeard,
    PartnerLost,
    PartnerStaged,
)
from worker.exchange.pairwise.stream import (
    ANCHOR,
    CONTRIBUTION,
    PARTS,
    Action,
    CheckPart,
    DropStream,
    EndStream,
    Misfit,
    OpenStream,
    PairBuffer,
    PairHeader,
    PairPart,
    PairSettings,
    PairStaged,
    PairStream,
    PartHeader,
    PartProgress,
    PartValid,
    Refusal,
    RefusalKind,
    Send,
    SendPart,
    StreamClosed,
    StreamEvent,
    Unfit,
)
from worker.exchange.types import GivenUp, View

_HEADER_S = 10.0  # in which an accepted stream must say what it is for


class _Unfitting(Exception):
    """What came does not fit; `again`: it may the next time."""

    def __init__(self, reason: str, *, again: bool = False) -> None:
        super().__init__(reason)
        self.again = again


class PairDialogue(ABC):
    """What this peer and its partners say to each other; a subclass decides which rounds there are.

    Args: settings: of the run. Times are monotonic seconds.
    """

    def __init__(self, settings: PairSettings) -> None:
        self._settings, self._me, self._config = settings, settings.me, settings.config
        self._skew = ArrivalSkew(settings.config)
        self._view, self._now = View(), 0.0
        self._buffers: dict[tuple[int, int], PairBuffer] = {}
        self._leaving: list[PairBuffer] = []  # given up, and partners are still to hear so
        self._versions: dict[int, int] = {}
        self._over: set[tuple[int, int]] = set()
        self._waiting: dict[PairStream, PairHeader] = {}  # for a round that is still to come
        self._headless: dict[PairStream, None] = {}
        self._changed = self._just_laid = False
        self._actions: list[Action] = []

    @abstractmethod
    def _step(self, buffer: PairBuffer, event: Event) -> None:
        """Something has happened in the round."""

    @abstractmethod
    def _anchor_came(self, buffer: PairBuffer) -> None:
        """A partner's anchor is here, and valid."""

    # ----------------------------------------------------------------------------- on the streams

    def accept(self, now: float, link: object = None) -> PairStream:
        """A partner has called; its header is to come. `link` is what carries the stream."""
        stream = PairStream(link=link, header_by=now + _HEADER_S)
        self._headless[stream] = None
        return stream

    def handle(self, stream: PairStream, event: StreamEvent, now: float) -> list[Action]:
        """Something has happened on a stream."""
        self._now = now
        if stream.over:
            return []
        try:
            match event:
                case StreamClosed(reason):
                    self._closed(stream, reason)
                case _ if stream.drained:
                    pass
                case Unfit(again, reason, part):
                    if part is not None and stream.buffer is not None:
                        stream.buffer.drop(stream, part)
                    raise _Unfitting(reason, again=again)
                case _ if stream.buffer is None:
                    self._admit(stream, event)
                case _ if stream.held is None:
                    self._answered(stream, stream.buffer, event)
                case _:
                    self._hear(stream, stream.buffer, event)
        except _Unfitting as error:
            self._unfit(stream, str(error), again=error.again)
        return self._flush()

    def forget(self, stream: PairStream) -> None:
        """The peer that served the stream has ended: nothing more comes, and none is to blame."""
        self._remove(stream)

    # ----------------------------------------------------------------------- admission and calls

    def _admit(self, stream: PairStream, header: StreamEvent) -> None:
        """The partner may join once this peer has come to the round."""
        if not isinstance(header, PairHeader):
            raise _Unfitting("a pair round must begin with its header")
        self._headless.pop(stream, None)
        stream.peer = header.sender
        self._waiting[stream] = header
        if header.run != self._settings.run:
            self._turn_away(stream, RefusalKind.RUN, "this is another run")
            return
        if header.fragment >= len(self._settings.forms):
            raise _Unfitting(f"fragment {header.fragment} of {len(self._settings.forms)}")
        if not self._view.live(header.sender):
            raise _Unfitting(f"{header.sender or 'nobody'} is not a member", again=True)
        self._decide(stream)

    def _decide(self, stream: PairStream) -> None:
        header = self._waiting[stream]
        key = (header.fragment, header.round)
        if (buffer := self._buffers.get(key)) is not None:
            calls = stream.peer in buffer.group and stream.peer < self._me
            if calls and self._settings.group_key(buffer.group) == header.group:
                del self._waiting[stream]
                self._seat(stream, buffer, header)
                return
            reason = "this peer has another partner in that round"
            self._turn_away(stream, RefusalKind.GROUP, reason)
        elif key in self._over or header.round < self._versions.get(header.fragment, 0):
            reason = f"round {header.round} is over here"
            self._turn_away(stream, RefusalKind.PRUNED, reason)

    def _turn_away(self, stream: PairStream, kind: RefusalKind, reason: str) -> None:
        header = self._waiting[stream]
        self._do(Misfit(stream.peer, header.round, False, reason, declined=True))
        self._do(Send(stream, Refusal(kind, reason)))
        self._end(stream)

    def _seat(self, stream: PairStream, buffer: PairBuffer, header: PairHeader) -> None:
        """The partner is in; an earlier stream of its is over."""
        if (earlier := buffer.streams.get(stream.peer)) is not None:
            self._drop(earlier)
        stream.buffer = buffer
        buffer.streams[stream.peer] = stream
        self._send_header(stream, buffer)
        self._hold(stream, buffer, header)

    def _reach(self, buffer: PairBuffer, peer: str, attempt: int) -> None:
        if peer not in buffer.streams and peer not in buffer.recalls:
            stream = PairStream(peer, buffer, attempt, calls=True)
            buffer.streams[peer] = stream
            self._do(OpenStream(stream))
            self._send_header(stream, buffer)

    def _send_header(self, stream: PairStream, buffer: PairBuffer) -> None:
        self._do(Send(stream, buffer.header(self._settings, stream.peer)))

    def _answered(self, stream: PairStream, buffer: PairBuffer, event: StreamEvent) -> None:
        """The first word of a partner that was called."""
        match event:
            case PairHeader():
                self._hold(stream, buffer, event)
            case Refusal(RefusalKind.AGAIN, reason):
                self._drop(stream)
                self._lose(stream, buffer, reason)
            case Refusal(_, reason):
                self._drop(stream)
                self._step(buffer, PartnerDeclined(stream.peer, reason))
            case _:
                raise _Unfitting("not the header that was expected", again=True)

    def _hold(self, stream: PairStream, buffer: PairBuffer, header: PairHeader) -> None:
        """Both sides have said who they are."""
        stream.held = header.held
        buffer.heard = self._now
        self._step(buffer, PartnerHeard(stream.peer))
        self._changed = True

    def _lose(self, stream: PairStream, buffer: PairBuffer, reason: str) -> None:
        """A stream is gone too early. A partner that was called is called again if the round has
        succeeded here, until it knows as well."""
        if stream.calls and buffer.succeeded:
            buffer.recalls[stream.peer] = self._now + self._config.retry_s, stream.attempt
        else:
            text = f"{stream.peer}: {reason}"
            self._step(buffer, PartnerLost(stream.peer, stream.attempt, text))

    def _closed(self, stream: PairStream, reason: str | None) -> None:
        buffer, peer = stream.buffer, stream.peer
        silent = buffer is not None and peer in buffer.staged and buffer.received(peer)
        if reason is None and silent and not stream.drained:
            stream.heard_all = True  # this side has still to say so
            return
        if not self._remove(stream) or buffer is None or (stream.drained and reason is None):
            return
        unanswered = stream.calls and stream.held is None
        broke_off = "ended without an answer" if unanswered else "the stream broke off"
        self._lose(stream, buffer, reason or broke_off)

    def _unfit(self, stream: PairStream, reason: str, *, again: bool) -> None:
        """What came on the stream does not fit."""
        buffer = stream.buffer
        if buffer is None:
            header = self._waiting.get(stream)
            self._do(Misfit(stream.peer, header.round if header else 0, again, reason))
        else:
            self._do(Misfit(stream.peer, buffer.round, again, reason))
            if stream.held is not None and not again:  # and would be the same the next time
                self._step(buffer, GivenUp(f"{stream.peer}: {reason}"))
                if buffer.ended:
                    self._drain(stream)
                    return
        if stream.calls and buffer is not None:
            self._drop(stream)
            self._lose(stream, buffer, reason)
            return
        if not stream.last_said:
            kind = RefusalKind.AGAIN if again else RefusalKind.INVALID
            self._do(Send(stream, Refusal(kind, reason)))
        self._end(stream)

    # ------------------------------------------------------------------------- saying and hearing

    def _pump(self, stream: PairStream, buffer: PairBuffer, *, busy: bool) -> None:
        """Each part as soon as there is one, then that everything is here."""
        if stream.held is None or stream.last_said or stream.drained:
            return
        if buffer.failed:  # even if all is here: the partner must not count on it
            self._say_last(stream, Refusal(RefusalKind.PRUNED, f"given up there: {buffer.failed}"))
            return
        for part in PARTS:
            if part in stream.said:
                continue
            if part not in buffer.own or (buffer.machine is None and busy):
                return
            stream.said.add(part)
            own, form = buffer.own[part], self._settings.forms[buffer.fragment][part]
            header = PartHeader(
                part=part,
                codec=form.codec,
                total_bytes=own.total_bytes,
                hash=own.hash,
                offset=stream.offset(own),
                weight=buffer.weight,
            )
            self._do(SendPart(stream, header, own))
        if buffer.complete:
            self._say_last(stream, PairStaged())

    def _say_last(self, stream: PairStream, message: PairStaged | Refusal) -> None:
        stream.last_said = True
        self._do(Send(stream, message))
        self._drain(stream)

    def _hear(self, stream: PairStream, buffer: PairBuffer, event: StreamEvent) -> None:
        peer = stream.peer
        match event:
            case PartHeader():
                self._expect(stream, buffer, event)
                if event.part == CONTRIBUTION:
                    self._step(buffer, PartnerCame(peer))
            case PartProgress(received_bytes):
                part = stream.arriving
                assert part is not None, "what arrives belongs to a part"
                part.received, buffer.heard = received_bytes, self._now
                if part.complete:
                    took_s = self._now - stream.arriving_since
                    self._skew.came(received_bytes - stream.here_before, took_s)
                self._step(buffer, PartnerHeard(peer))
            case PartValid(part):
                part.checked = True
                stream.checking.discard(part)
                if part is buffer.theirs[peer].get(ANCHOR):
                    self._anchor_came(buffer)
                if buffer.received(peer):
                    buffer.last = peer
                    self._step(buffer, PartnerComplete(peer))
            case PairStaged():
                buffer.staged.add(peer)
                self._step(buffer, PartnerStaged(peer))
            case Refusal(RefusalKind.AGAIN, reason):
                self._drop(stream)
                self._lose(stream, buffer, reason)
                return
            case Refusal(_, reason):
                buffer.declined[peer] = reason
                self._step(buffer, PartnerDeclined(peer, reason))
            case _:
                raise _Unfitting(f"{buffer.name} from {peer}: an unexpected message")
        self._check(stream, buffer)
        self._drain(stream)

    def _expect(self, stream: PairStream, buffer: PairBuffer, header: PartHeader) -> None:
        """A part of the partner's begins, or goes on."""
        peer, part, name = stream.peer, header.part, f"{buffer.name} from {stream.peer}"
        if part not in PARTS:
            raise _Unfitting(f"{name}: part {part}")
        form = self._settings.forms[buffer.fragment][part]
        if (header.codec, header.total_bytes) != (form.codec, form.total_bytes):
            raise _Unfitting(
                f"{name}: {header.total_bytes} bytes of codec {header.codec}; "
                f"expected {form.total_bytes} bytes of {form.name}"
            )
        incoming = buffer.theirs[peer].get(part)
        if incoming is not None and buffer.machine is not None and buffer.received(peer):
            # The round counts on what is here.
            if (header.hash, header.weight) != (incoming.hash, incoming.weight):
                raise _Unfitting(f"{name}: other values than before")
        elif incoming is None or incoming.hash != header.hash or header.offset == 0:
            incoming = buffer.theirs[peer][part] = PairPart(header.hash, form.total_bytes)
        if header.offset != incoming.received:
            raise _Unfitting(f"{name}: goes on at {header.offset}", again=True)
        incoming.weight = header.weight
        stream.arriving, stream.arriving_index, stream.arriving_since = incoming, part, self._now
        stream.here_before = incoming.received

    def _check(self, stream: PairStream, buffer: PairBuffer) -> None:
        """The partner's parts that are complete, but not known to be valid."""
        for index, part in buffer.theirs[stream.peer].items():
            if part.complete and not part.checked and part not in stream.checking:
                stream.checking.add(part)
                self._do(CheckPart(stream, part, index))

    def _drain(self, stream: PairStream) -> None:
        """Ends the stream if nothing that matters is to be said any more, or leaves that to the
        partner that was called."""
        buffer, peer = stream.buffer, stream.peer
        if buffer is None or stream.over or stream.drained:
            return
        given_up = buffer.failed and stream.last_said
        all_said = stream.last_said and peer in buffer.staged and buffer.received(peer)
        if not (given_up or all_said or peer in buffer.declined):
            return
        if stream.calls and not stream.heard_all:
            stream.drained = True
        elif peer in buffer.declined:
            self._drop(stream)
        else:
            self._end(stream)

    # ------------------------------------------------------------------------------------ helpers

    def _drop(self, stream: PairStream) -> None:
        self._remove(stream)
        self._do(DropStream(stream))

    def _end(self, stream: PairStream) -> None:
        self._remove(stream)
        self._do(EndStream(stream))

    def _remove(self, stream: PairStream) -> bool:
        """Nothing more comes on the stream; returns whether it was the partner's last."""
        stream.over = True
        self._waiting.pop(stream, None)
        self._headless.pop(stream, None)
        buffer = stream.buffer
        if buffer is None or buffer.streams.get(stream.peer) is not stream:
            return False
        del buffer.streams[stream.peer]
        return True

    def _do(self, action: Action) -> None:
        self._actions.append(action)

    def _flush(self) -> list[Action]:
        """What is to be done, after all that a change has made possible."""
        while self._changed:
            self._changed = False
            for stream in list(self._waiting):
                self._decide(stream)
            buffers = [*self._buffers.values(), *self._leaving]
            busy = self._just_laid or any(b.machine and not b.ended for b in buffers)
            for buffer in buffers:
                for stream in list(buffer.streams.values()):
                    self._pump(stream, buffer, busy=busy)
        actions, self._actions = self._actions, []
        return actions
