"""A peer's rounds in pairs or small groups: what its I/O does around `PairRound`.

Who has all anchors before the round goes on from their mean, so peers wait for them before they
compute, as long as something comes; as workers without overlap do.
"""

from collections.abc import Sequence

from algorithms.codecs import codec_by_name
from algorithms.diloco import mean_in_order
from algorithms.plan import PRESETS
from worker.catchup.repair import step_of_the_others
from worker.exchange.pairwise import round as machine
from worker.exchange.pairwise.round import PairRound
from worker.exchange.types import Failed, RoundTick, Succeeded, Suspect, ViewUpdated
from worker.membership import Digest
from worker.simulation.peer import Account
from worker.simulation.swarm import Swarm
from worker.simulation.table import ANCHOR, CONTRIBUTION, Table
from worker.simulation.talk import Talk
from worker.simulation.task import Quadratic

_PART_S = 1.0
_QUIET_S = 1.0  # in which nothing has come: anchors are not waited for
_KEEP_ROUNDS = 2


class PairPeer(Talk):
    """Args: peers: all of the swarm, by number."""

    def __init__(
        self,
        swarm: Swarm,
        number: int,
        task: Quadratic,
        account: Account,
        peers: "Sequence[PairPeer]",
    ) -> None:
        scenario, plan = swarm.scenario, PRESETS["noloco"]
        sizes = {
            ANCHOR: codec_by_name(plan.anchor_codec).encoded_bytes(scenario.params),
            CONTRIBUTION: codec_by_name(scenario.codec).encoded_bytes(scenario.params),
        }
        super().__init__(swarm, number, task, account, peers, sizes)
        self._outer, self._start = plan.group_update(), self.anchor
        self._in_step = True  # with the others: it has exchanged in the last round, as they have
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
        table.meeting = PairRound(
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
        self._step(table, RoundTick())
        self._say_all(table)
        self._wake()

    def _catch_up(self) -> None:
        """Where most have gone on without this peer, it goes on where they are."""
        if not self.swarm.may_be_left_behind(self.number, self.round):
            return
        mine, others = (Digest(self.round, 0, 0),), self.swarm.members(self.number)
        partners = self.swarm.group(self.number, self.round)
        if (round_ := step_of_the_others(mine, others, partners)) is not None:
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
                    self._step(table, ViewUpdated(self.swarm.view(self.number)))
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
                case Suspect():
                    pass
                case Succeeded():
                    assert not table.ended, "a round is applied once"
                    table.succeeded = table.complete = True
                    self._say_all(table)
                    self._end(table, "")
                case Failed(reason, _):
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
            self._step(table, RoundTick())

        self.at(time_s, look)

    def _watch(self, table: Table) -> None:
        """Something is amiss: from now on time alone may end the round, or open a stream again."""
        if table.meeting is None or table.ended or table in self._watched:
            return
        self._watched.add(table)

        def look() -> None:
            self._step(table, RoundTick())
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

    def _start_from_group(self, table: Table) -> None:
        """A head start, where all anchors of the next round are here before it."""
        early = table.meeting is None and table.round == self.round and not table.left
        if not early or self._start is not self.anchor or len(table.anchors) < len(table.group):
            return
        start = self._outer.head_start(mean_in_order(table.anchors[peer] for peer in table.group))
        if start is not None:
            self.local, self._start = self.local - self.anchor + start, start
        self._go_on()
