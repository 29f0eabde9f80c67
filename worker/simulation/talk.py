"""What partners of a simulated round say to each other, as `worker.exchange.pairwise.stream` does.

The stream to the next partner is opened when a round is over, and the anchor goes ahead on it; the
contribution follows when it is due.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence

from torch import Tensor

from worker.exchange.pairwise import round as machine
from worker.exchange.pairwise.round import ArrivalSkew
from worker.simulation.network import Stream
from worker.simulation.peer import Account, Peer
from worker.simulation.swarm import Group, Swarm
from worker.simulation.table import ANCHOR, CONTRIBUTION, Table
from worker.simulation.task import Quadratic


class Talk(Peer):
    """Streams and what goes over them; a subclass holds the rounds.

    Args:
        peers: all of the swarm, by number.
        sizes: of the parts, in bytes.
    """

    def __init__(
        self,
        swarm: Swarm,
        number: int,
        task: Quadratic,
        account: Account,
        peers: "Sequence[Talk]",
        sizes: Mapping[str, int],
    ) -> None:
        super().__init__(swarm, number, task, account)
        self._peers, self._sizes, self.round = peers, sizes, 0
        self._lead = ArrivalSkew(swarm.config)
        self._tables: dict[int, Table] = {}
        self._seats: dict[int, Table] = {}  # by stream
        self._callers: list[tuple[Stream, int, Group]] = []  # for rounds that are still to come
        self._over: set[int] = set()

    @abstractmethod
    def _step(self, table: Table, event: machine.Event) -> None:
        """Something has happened in the round."""

    @abstractmethod
    def _watch(self, table: Table) -> None:
        """Something is amiss in the round."""

    @abstractmethod
    def _heard(self, table: Table, partner: int) -> None:
        """Bytes of the partner's are arriving."""

    @abstractmethod
    def _start_from_group(self, table: Table) -> None:
        """An anchor is here."""

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

    def _send_part(self, stream: Stream, partner: "Talk", part: str, values: Tensor) -> None:
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

    def heard_staged(self, stream: Stream) -> None:
        """The partner holds everything."""
        if (table := self._seats.get(stream.number)) is None:
            return
        stream.said[self.number].add("heard")
        self._step(table, machine.PartnerStaged(self.swarm.names[stream.other(self.number)]))
        if stream.number in self._seats:
            self._say(table, stream)
