"""A peer's rounds in pairs or small groups: what `worker.exchange.pairs` does around `Meeting`.

The stream to the next partner is opened when a round is over, and the anchor goes ahead on it; the
contribution follows when it is due. Who has all anchors before that goes on from their mean, so
peers wait for them, as long as something comes, before they compute; as workers without overlap do.
"""

import math
from collections.abc import Sequence

from torch import Tensor

from algorithms.codecs import codec_by_name
from algorithms.mean import mean_in_order
from algorithms.plan import PRESETS
from worker.membership import Digest
from worker.rounds import Lead, Meeting
from worker.rounds import meeting as machine
from worker.rounds.repair import step_of_the_others
from worker.simulation.network import Stream
from worker.simulation.peer import Account, Peer
from worker.simulation.swarm import Group, Swarm
from worker.simulation.table import ANCHOR, CONTRIBUTION, Table
from worker.simulation.task import Quadratic

_PART_S = 1.0
_QUIET_S = 1.0  # in which nothing has come: anchors are not waited for
_KEEP_ROUNDS = 2


class PairPeer(Peer):
    """Args: peers: all of the swarm, by number."""

    def __init__(
        self,
        swarm: Swarm,
        number: int,
        task: Quadratic,
        account: Account,
        peers: "Sequence[PairPeer]",
    ) -> None:
        super().__init__(swarm, number, task, account)
        self._peers, self.round = peers, 0
        scenario, plan = swarm.scenario, PRESETS["noloco"]
        self._outer, self._start = plan.group_update(), self.anchor
        self._sizes = {
            ANCHOR: codec_by_name(plan.anchor_codec).encoded_bytes(scenario.params),
            CONTRIBUTION: codec_by_name(scenario.codec).encoded_bytes(scenario.params),
        }
        self._tables: dict[int, Table] = {}
        self._seats: dict[int, Table] = {}  # by stream
        self._callers: list[tuple[Stream, int, Group]] = []  # for rounds that are still to come
        self._over: set[int] = set()
        self._in_step = True  # with the others: it has exchanged in the last round, as they have
        self._lead = Lead(swarm.config)
        self._awaits = False  # the anchors of the next round's group
        self._watched: set[Table] = set()

    def start(self) -> None:
        """From the beginning of the run."""
        self._enter(0)

    # ---------------------------------------------------------------------------- the train side

    def _enter(self, round_: int) -> None:
        """On to the inner steps before this round."""
        self.round = round_
        self._advanced()
        if round_ >= self.swarm.scenario.rounds:
            self.finish()
            self._wake()
            return
        table = self._lay(round_)
        one = len(table.group) == self.swarm.scenario.peers and self._in_step
        if round_ == 0 or len(table.group) == 1 or one:  # all have one anchor, or none is to come
            self.compute()
        else:
            self._await_anchors()

    def _await_anchors(self) -> None:
        self._awaits = True

        lead_s = 0.0 if self._in_step else self._lead.lead_s(sum(self._sizes.values()))

        def look() -> None:
            table = self._tables.get(self.round)
            if table is not None and any(s.arriving(p) for p, s in table.streams.items()):
                self.later(_QUIET_S, look)
            else:
                self._go_on()

        self.later(_QUIET_S + lead_s, look)

    def _go_on(self) -> None:
        """With the next inner steps, whether anchors have come or not."""
        if self._awaits:
            self._awaits = False
            self.waited()
            self.compute()

    def begin(self) -> None:
        self._catch_up()
        table = self._tables.get(self.round)
        if table is None or table.group != self.swarm.group(self.number, self.round):
            table = self._lay(self.round)
        g = self._start - self.local
        table.contributions[self.me] = self._outer.contribution(g, self.momentum)
        table.meeting = Meeting(
            self.me,
            table.group,
            self.swarm.view(self.number),
            self.swarm.config,
            fragment=0,
            round_=self.round,
            began_at=self.now,
            payload_bytes=sum(self._sizes.values()),
            lead_s=self._lead.lead_s(sum(self._sizes.values())),
        )
        self._look_at(table.meeting.patience_until, table)
        self.at(table.meeting.deadline, lambda: self._watch(table))
        for event in table.seen(self._sizes):  # before the round had begun here
            self._step(table, event)
        self._step(table, machine.Tick())
        self._say_all(table)
        self._wake()

    def _catch_up(self) -> None:
        """Where most have gone on without this peer, it goes on where they are."""
        if not self.swarm.may_be_left_behind(self.number, self.round):
            return
        mine, others = (Digest(self.round, 0, 0),), self.swarm.cards(self.number)
        if (round_ := step_of_the_others(mine, others)) is not None:
            self.round = min(round_, self.swarm.scenario.rounds - 1)
            self._advanced()

    def _advanced(self) -> None:
        """At another round: what is too old is left, and what has been skipped."""
        self.swarm.advanced(self.number, Digest(self.round, 0, 0))
        for table in list(self._tables.values()):
            skipped = table.round < self.round and table.meeting is None
            if table.round < self.round - _KEEP_ROUNDS or skipped:
                self._leave(table)

    def _end(self, table: Table, reason: str) -> None:
        waited_s = self.waited()
        self._in_step = not reason and len(table.group) > 1
        self.account.rounds += 1
        if reason:
            self.account.failed(reason)
            self.local, self._start = self.local - self._start + self.anchor, self.anchor
        else:
            mean = mean_in_order(table.contributions[peer] for peer in table.group)
            mean_anchor = mean_in_order(table.anchors[peer] for peer in table.group)
            self.anchor, self.momentum = self._outer.step(
                self.anchor, self.momentum, mean, mean_anchor
            )
            self.local, self._start = self.anchor.clone(), self.anchor
            if len(table.group) > 1:
                self.account.syncs_s.append(waited_s)
                self.account.applied[table.round, table.group] += 1
        self._enter(table.round + 1)

    # -------------------------------------------------------------------------------- the machine

    def viewed(self, changed: frozenset[str]) -> None:
        for table in list(self._tables.values()):
            if table.meeting is not None:
                if not changed.isdisjoint(table.group):
                    self._step(table, machine.Viewed(self.swarm.view(self.number)))
                    self._watch(table)
            elif table.group != self.swarm.group(self.number, table.round):
                self._lay(table.round)

    def _step(self, table: Table, event: machine.Event) -> None:
        if table.meeting is None or table.ended:
            return
        for action in table.meeting.step(event, self.now):
            match action:
                case machine.Open(peer, attempt):
                    self._call(table, int(peer[1:]), attempt)
                case machine.Stage():
                    table.complete = True
                    self._say_all(table)
                case machine.Doubt():
                    pass
                case machine.Succeeded():
                    assert not table.ended, "a round is applied once"
                    table.succeeded = table.complete = True
                    self._say_all(table)
                    self._end(table, "")
                case machine.Failed(reason, _):
                    table.failed = reason
                    self._clear(table)
                    self._over.add(table.round)
                    self._say_all(table)
                    self.later(_PART_S, lambda: self._leave(table))
                    self._end(table, reason)

    def _look_at(self, time_s: float, table: Table) -> None:
        """At that time it may be too long that nothing has been heard of a partner."""

        def look() -> None:
            for partner, stream in list(table.streams.items()):
                if stream.arriving(partner):
                    self._heard(table, partner)
            self._step(table, machine.Tick())

        self.at(time_s, look)

    def _watch(self, table: Table) -> None:
        """Something is amiss: from now on time alone may end the round, or open a stream again."""
        if table.meeting is None or table.ended or table in self._watched:
            return
        self._watched.add(table)

        def look() -> None:
            self._step(table, machine.Tick())
            if table.ended:
                self._watched.remove(table)
            else:
                self.later(self.swarm.config.retry_s, look)

        look()

    def _heard(self, table: Table, partner: int) -> None:
        """Bytes of the partner's are arriving. Once it has come to the round that is no news."""
        if table.meeting is not None and not table.ended and partner not in table.met:
            self._step(table, machine.Heard(self.swarm.names[partner]))
            self._look_at(self.now + self.swarm.config.patience_s, table)

    # -------------------------------------------------------------------------------- the streams

    def _lay(self, round_: int) -> Table:
        """A table for the round in place of an earlier one."""
        if (earlier := self._tables.get(round_)) is not None:
            self._leave(earlier)
        table = Table(round_, self.swarm.group(self.number, round_))
        table.anchors[self.me] = self.anchor
        self._tables[round_] = table
        for peer in table.group:
            if peer > self.me:
                self._call(table, int(peer[1:]), 1)
        self._wake()
        return table

    def _clear(self, table: Table) -> None:
        if self._tables.get(table.round) is table:
            del self._tables[table.round]

    def _leave(self, table: Table) -> None:
        self._clear(table)
        table.left = True
        for stream in table.streams.values():
            self._seats.pop(stream.number, None)
            self.swarm.network.abort(stream, self.number)
        table.streams.clear()

    def _call(self, table: Table, peer: int, attempt: int) -> None:
        if peer in table.streams or table.left:
            return
        if table.succeeded and not self.swarm.view(self.number).live(self.swarm.names[peer]):
            # It may come back, and does not know yet.
            self.later(self.swarm.config.retry_s, lambda: self._call(table, peer, attempt))
            return
        stream = self.swarm.network.open(self.number, peer, attempt)
        table.streams[peer] = stream
        self._seats[stream.number] = table
        round_, group = table.round, table.group
        stream.send(self.number, lambda: self._peers[peer].called(stream, round_, group))

    def called(self, stream: Stream, round_: int, group: Group) -> None:
        """A partner has opened a stream for a round."""
        table = self._tables.get(round_)
        if table is not None and table.group == group:
            if (earlier := table.streams.pop(stream.caller, None)) is not None:
                self._seats.pop(earlier.number, None)
                self.swarm.network.abort(earlier, self.number)
            table.streams[stream.caller] = stream
            self._seats[stream.number] = table
            stream.said[self.number].add("seated")
            stream.send(self.number, lambda: self._peers[stream.caller].seated(stream))
            self._say(table, stream)
        elif table is not None:
            self._refuse(stream, "has another partner in that round")
        elif round_ in self._over or round_ < self.round:
            self._refuse(stream, "is past that round")
        else:
            self._callers.append((stream, round_, group))

    def seated(self, stream: Stream) -> None:
        """The partner that was called is there."""
        if (table := self._seats.get(stream.number)) is not None:
            stream.said[self.number].add("seated")
            self._say(table, stream)

    def _refuse(self, stream: Stream, reason: str) -> None:
        stream.send(self.number, lambda: self._peers[stream.caller].refused(stream, reason))

    def refused(self, stream: Stream, reason: str) -> None:
        """The partner will not hold the round, or has given it up."""
        stream.close()
        if (table := self._seats.get(stream.number)) is None:
            return
        other = stream.other(self.number)
        self._rise(table, stream)
        if "seated" in stream.said[self.number]:
            table.declined[other] = reason
        self._step(table, machine.Declined(self.swarm.names[other], reason))

    def broken(self, stream: Stream) -> None:
        table = self._seats.get(stream.number)
        if table is None or not self._rise(table, stream):
            return
        other, calls = stream.other(self.number), stream.caller == self.number
        if table.succeeded and calls:
            self.later(self.swarm.config.retry_s, lambda: self._call(table, other, stream.attempt))
            return
        attempt, name = stream.attempt if calls else 0, self.swarm.names[other]
        self._step(table, machine.Broken(name, attempt, "a stream broke"))
        self._watch(table)

    def closed(self, stream: Stream) -> None:
        """The partner that was called has heard everything, and has ended the stream."""
        stream.close()
        if (table := self._seats.get(stream.number)) is not None:
            self._rise(table, stream)

    def _rise(self, table: Table, stream: Stream) -> bool:
        """Nothing more comes on the stream; returns whether it was the partner's last."""
        del self._seats[stream.number]
        other = stream.other(self.number)
        if table.streams.get(other) is not stream:
            return False
        del table.streams[other]
        return True

    def _wake(self) -> None:
        """Callers that had come too early are asked again."""
        if self._callers:
            callers, self._callers = self._callers, []
            for stream, round_, group in callers:
                if not stream.ended:
                    self.called(stream, round_, group)

    # --------------------------------------------------------------------------------- the parts

    def _say_all(self, table: Table) -> None:
        for stream in list(table.streams.values()):
            self._say(table, stream)

    def _say(self, table: Table, stream: Stream) -> None:
        """All that is there and has not been said on this stream."""
        said = stream.said[self.number]
        if stream.ended or "seated" not in said:
            return
        partner = self._peers[stream.other(self.number)]
        if table.failed:
            if "failed" not in said:
                said.add("failed")
                stream.drop_unsent(self.number)
                reason = f"given up there: {table.failed}"
                stream.send(self.number, lambda: partner.refused(stream, reason))
            return
        if ANCHOR not in said:
            self._send_part(stream, partner, ANCHOR, table.anchors[self.me])
        if self.me in table.contributions and CONTRIBUTION not in said:
            self._send_part(stream, partner, CONTRIBUTION, table.contributions[self.me])
        if table.complete and "staged" not in said:
            said.add("staged")
            stream.send(self.number, lambda: partner.heard_staged(stream))
        if stream.callee == self.number and {"staged", "heard"} <= said:
            self._rise(table, stream)
            stream.send(self.number, lambda: partner.closed(stream))

    def _send_part(self, stream: Stream, partner: "PairPeer", part: str, values: Tensor) -> None:
        stream.said[self.number].add(part)
        key, size = (self.number, part), self._sizes[part]
        theirs = partner._seats[stream.number]
        before = theirs.held.get(key, 0.0)

        def keep(came: float) -> None:
            theirs.held[key] = max(theirs.held.get(key, 0.0), before + came)

        stream.send(self.number, lambda: partner.takes(stream, part))
        stream.send(
            self.number,
            lambda: partner.took(stream, part, values),
            math.ceil(size - before),
            keep,
        )

    def takes(self, stream: Stream, part: str) -> None:
        """A part of the partner's is on its way; the contribution when it has come to the round."""
        if (table := self._seats.get(stream.number)) is None:
            return
        other = stream.other(self.number)
        table.coming[other] = (self.now, table.held.get((other, part), 0.0))
        if part == CONTRIBUTION:
            table.met.add(other)
            self._step(table, machine.Met(self.swarm.names[other]))

    def took(self, stream: Stream, part: str, values: Tensor) -> None:
        """A part of the partner's is here, all of it."""
        if (table := self._seats.get(stream.number)) is None:
            return
        other = stream.other(self.number)
        name = self.swarm.names[other]
        began_s, before = table.coming[other]
        self._lead.came(math.ceil(self._sizes[part] - before), self.now - began_s)
        table.held[other, part] = self._sizes[part]
        if part == ANCHOR:
            table.anchors[name] = values
            self._start_from_group(table)
        else:
            table.contributions[name] = values
        self._heard(table, other)
        if table.received(other, self._sizes):
            self._step(table, machine.Received(name))

    def _start_from_group(self, table: Table) -> None:
        """A head start, where all anchors of the next round are here before it."""
        early = table.meeting is None and table.round == self.round and not table.left
        if not early or self._start is not self.anchor or len(table.anchors) < len(table.group):
            return
        start = self._outer.head_start(mean_in_order(table.anchors[peer] for peer in table.group))
        if start is not None:
            self.local, self._start = self.local - self.anchor + start, start
        self._go_on()

    def heard_staged(self, stream: Stream) -> None:
        """The partner holds everything."""
        if (table := self._seats.get(stream.number)) is None:
            return
        stream.said[self.number].add("heard")
        self._step(table, machine.PartnerStaged(self.swarm.names[stream.other(self.number)]))
        if stream.number in self._seats:
            self._say(table, stream)
