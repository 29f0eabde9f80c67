"""A simulated peer's pair rounds: carries out what the live machine says, over a virtual network.

A peer that has all anchors before the round goes on from their mean. It waits for them before it
computes, as workers without overlap do.
"""

import math
from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import count

from torch import Tensor

from algorithms.codecs import codec_by_name
from algorithms.diloco import mean_in_order
from algorithms.presets import PRESETS
from worker.catchup.repair import step_of_the_others
from worker.exchange.pairwise.rounds import PairRounds
from worker.exchange.pairwise.stream import (
    ANCHOR,
    CONTRIBUTION,
    Action,
    AverageAnchors,
    CheckPart,
    DropStream,
    EndStream,
    Message,
    OpenStream,
    PairBuffer,
    PairHeader,
    PairPart,
    PairSettings,
    PairStream,
    PartForm,
    PartHeader,
    PartProgress,
    PartValid,
    Refusal,
    RoundEnded,
    Send,
    SendPart,
    StreamClosed,
    StreamEvent,
    TellAnchor,
)
from worker.exchange.types import Failed, Succeeded
from worker.membership import Digest, Phase
from worker.simulation.network import SimulatedStream
from worker.simulation.peer import Account, Peer
from worker.simulation.swarm import RUN, SimulatedSwarm
from worker.simulation.task import Quadratic


class PairPeer(Peer):
    """Args: peers: all of the swarm, by number."""

    def __init__(
        self,
        swarm: SimulatedSwarm,
        number: int,
        task: Quadratic,
        account: Account,
        peers: "Sequence[PairPeer]",
    ) -> None:
        super().__init__(swarm, number, task, account)
        scenario, plan = swarm.scenario, PRESETS["noloco"]
        codecs = codec_by_name(plan.anchor_codec), codec_by_name(scenario.codec)
        anchor, contribution = self._forms = [
            PartForm(codec.wire_id, codec.name, codec.encoded_bytes(scenario.params))
            for codec in codecs
        ]
        self.rounds = PairRounds(
            PairSettings(
                me=self.me,
                run=RUN,
                forms=[(anchor, contribution)],
                rounds=[scenario.rounds],
                config=swarm.config,
                group_size=scenario.group_size,
                anchors_told=plan.shared_momentum,
                anchors_awaited=plan.overlap_steps == 0,
            )
        )
        self.round, self._peers, self._hashes = 0, peers, count(1)
        self._streams: dict[int, PairStream] = {}  # by the network's number
        self._outer, self._start = plan.group_update(), self.anchor
        self._awaits = False  # the anchors of the next round's group
        self._due_s, self._todo = math.inf, deque[Action]()

    def start(self) -> None:
        """From the beginning of the run."""
        self._carry(self.rounds.on_view(self.swarm.view(self.number), self.now))
        self._enter(0)

    # ---------------------------------------------------------------------------- the train side

    def _enter(self, round_: int) -> None:
        """On to the inner steps before this round."""
        done = round_ >= self.swarm.scenario.rounds
        self._awaits = round_ > 0 and not done
        self._advance(round_, Phase.DONE if done else Phase.TRAINING)
        if done:
            self.finish()
        elif round_ == 0:  # all have one anchor
            self.compute()

    def _advance(self, round_: int, phase: Phase = Phase.TRAINING) -> None:
        self.round = round_
        self.swarm.advanced(self.number, Digest(round_, 0, 0), phase)
        wanted = self.rounds.wants_anchor(0, round_)
        self._carry(self.rounds.advanced(0, round_, self.now))
        if wanted:
            self._carry(self.rounds.lay(0, round_, self._part(ANCHOR, self.anchor), self.now))
            self.later(0.0, lambda: self._carry(self.rounds.poll(self.now)))

    def begin(self) -> None:
        self._catch_up()
        g = self._outer.contribution(self._start - self.local, self.momentum)
        key = (0, self.round)
        anchor = None if self.rounds.is_laid(*key) else self._part(ANCHOR, self.anchor)
        contribution = self._part(CONTRIBUTION, g)
        self._carry(self.rounds.begin(key, contribution, anchor, self.now))

    def _catch_up(self) -> None:
        """Where most have gone on without this peer, it goes on where they are."""
        if not self.swarm.may_be_left_behind(self.number, self.round):
            return
        mine, others = (Digest(self.round, 0, 0),), self.swarm.members(self.number)
        partners = self.rounds.group(0, self.round)
        if (round_ := step_of_the_others(mine, others, partners)) is not None:
            self._advance(min(round_, self.swarm.scenario.rounds - 1))

    def _prefetched(self, round_: int, mean_anchor: object) -> None:
        """The train side hears of the next round's anchors."""
        if round_ != self.round or self._start is not self.anchor:
            return
        if isinstance(mean_anchor, Tensor):
            start = self._outer.head_start(mean_anchor)
            if start is not None:
                self.local, self._start = self.local - self.anchor + start, start
        if self._awaits:
            self._awaits = False
            self.waited()
            self.compute()

    def ended(self, buffer: PairBuffer, outcome: Succeeded | Failed) -> None:
        """A round is over: its mean is applied, or the peer goes on from its own anchor."""
        waited_s = self.waited()
        self.account.rounds += 1
        if isinstance(outcome, Failed):
            self.account.failed(outcome.reason)
            self.local, self._start = self.local - self._start + self.anchor, self.anchor
        else:
            mean, mean_anchor = self._mean(buffer, CONTRIBUTION), self._mean(buffer, ANCHOR)
            self.anchor, self.momentum = self._outer.step(
                self.anchor, self.momentum, mean, mean_anchor
            )
            self.local, self._start = self.anchor.clone(), self.anchor
            if len(buffer.group) > 1:
                self.account.syncs_s.append(waited_s)
                self.account.applied[buffer.round, buffer.group] += 1
        self._enter(buffer.round + 1)

    def _mean(self, buffer: PairBuffer, index: int) -> Tensor:
        return mean_in_order(_tensor(part) for part in buffer.parts(index, self.me))

    def _part(self, index: int, values: Tensor) -> PairPart:
        form = self._forms[index]
        return PairPart(next(self._hashes), form.total_bytes, values=values)

    # -------------------------------------------------------------------------------- the machine

    def viewed(self, changed: frozenset[str]) -> None:
        self._carry(self.rounds.on_view(self.swarm.view(self.number), self.now))

    def _tick(self) -> None:
        """Frames of what is arriving have come; and time passes."""
        self._due_s = math.inf
        for stream in list(self._streams.values()):
            part, link = stream.arriving, _link(stream)
            if part is not None and not part.complete and link.arriving(link.other(self.number)):
                self._handle(stream, PartProgress(part.received))
        self._carry(self.rounds.tick(self.now))

    def _handle(self, stream: PairStream, event: StreamEvent) -> None:
        self._carry(self.rounds.handle(stream, event, self.now))

    def _carry(self, actions: list[Action]) -> None:
        """Does what the machine says, in its order, and then what follows from that."""
        carrying = bool(self._todo)
        self._todo.extend(actions)
        while self._todo and not carrying:
            self._do(self._todo[0])
            self._todo.popleft()
        due_s = self.rounds.due_at(self.now)
        if not carrying and due_s < self._due_s:
            self._due_s = due_s
            self.at(due_s, self._tick)

    def _do(self, action: Action) -> None:
        match action:
            case OpenStream(stream):
                link = self.swarm.network.open(self.number, int(stream.peer[1:]), 1)
                stream.link, self._streams[link.number] = link, stream
            case Send(stream, message):
                link = _link(stream)
                if isinstance(message, Refusal):
                    link.drop_unsent(self.number)
                link.send(self.number, partial(self._other(link).hears, link, message))
            case SendPart(stream, header, part):
                self._send_part(_link(stream), header, part)
            case EndStream(stream):
                link = _link(stream)
                self._streams.pop(link.number, None)
                link.send(self.number, partial(self._other(link).hears_end, link))
            case DropStream(stream):
                self._streams.pop(_link(stream).number, None)
                self.swarm.network.abort(_link(stream), self.number)
            case CheckPart(stream, part):
                self._handle(stream, PartValid(part))
            case AverageAnchors(buffer):
                self._carry(self.rounds.anchors_averaged(buffer, self._mean(buffer, ANCHOR)))
            case TellAnchor(_, round_, mean_anchor):
                self._prefetched(round_, mean_anchor)
            case RoundEnded(buffer, outcome):
                self.ended(buffer, outcome)

    def _send_part(self, link: SimulatedStream, header: PartHeader, part: PairPart) -> None:
        other, offset = self._other(link), header.offset

        def came(size: float) -> None:
            stream = other._streams.get(link.number)
            theirs = stream.arriving if stream is not None else None
            if theirs is not None and theirs.hash == part.hash:
                theirs.received = max(theirs.received, offset + math.floor(size))

        link.send(self.number, lambda: other.hears(link, header, part.values))
        if offset < part.total_bytes:
            size = part.total_bytes - offset
            link.send(self.number, lambda: other.hears_all(link), size, came)

    # ------------------------------------------------------------------------------- the streams

    def hears(self, link: SimulatedStream, message: Message, values: object = None) -> None:
        """A message has come, with what a part is made of."""
        stream = self._streams.get(link.number)
        if stream is None and isinstance(message, PairHeader):
            stream = self._streams[link.number] = self.rounds.accept(self.now, link)
        if stream is not None:
            self._handle(stream, message)
            if stream.arriving is not None and values is not None:
                stream.arriving.values = values

    def hears_all(self, link: SimulatedStream) -> None:
        """The bytes of a part are here, all of them."""
        stream = self._streams.get(link.number)
        if stream is not None and (part := stream.arriving) is not None:
            self._handle(stream, PartProgress(part.total_bytes))

    def hears_end(self, link: SimulatedStream) -> None:
        """The partner that was called has ended the stream."""
        link.close()
        self._close(link, None)

    def broken(self, stream: SimulatedStream) -> None:
        self._close(stream, "a stream broke")

    def _close(self, link: SimulatedStream, reason: str | None) -> None:
        if (stream := self._streams.pop(link.number, None)) is not None:
            self._handle(stream, StreamClosed(reason))

    def _other(self, link: SimulatedStream) -> "PairPeer":
        return self._peers[link.other(self.number)]


def _link(stream: PairStream) -> SimulatedStream:
    assert isinstance(stream.link, SimulatedStream), "a stream of this network"
    return stream.link


def _tensor(part: PairPart) -> Tensor:
    assert isinstance(part.values, Tensor), "its values have come"
    return part.values
