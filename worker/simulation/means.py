"""A peer's rounds of the leaderless mean: what its I/O does around
`Contributing`, each shard to its reducer and the reduction back on the same stream.
"""

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from algorithms.codecs import codec_by_name
from algorithms.diloco import Nesterov, carry_over
from algorithms.plan import PRESETS
from worker.catchup.repair import choose_repair
from worker.exchange.allreduce import contributor as own
from worker.exchange.allreduce import reducer as shared
from worker.exchange.allreduce.contributor import Contributing
from worker.exchange.types import Failed, RoundTick, ShardKey, Succeeded, Suspect, ViewUpdated
from worker.membership import Digest, Phase
from worker.simulation.clock import Act
from worker.simulation.network import Stream
from worker.simulation.peer import Account, Peer
from worker.simulation.reducer import Reducer, Reduction, Visit, orders, shard_bytes
from worker.simulation.swarm import Group, Swarm
from worker.simulation.task import VALUES, Quadratic

_Report = own.Reduced | own.Redirected | own.Broken | own.Refused
_State = tuple[Digest, Group, Tensor, Tensor]

_REPAIR_S = 1.0  # between two tries to find somebody to take the state from


class MeanPeer(Peer):
    """Args: peers: all of the swarm, by number."""

    def __init__(
        self,
        swarm: Swarm,
        number: int,
        task: Quadratic,
        account: Account,
        peers: "Sequence[MeanPeer]",
    ) -> None:
        super().__init__(swarm, number, task, account)
        scenario = swarm.scenario
        self._peers, self._version, self._group = peers, 0, swarm.names
        outer = PRESETS["diloco"]
        self._outer = Nesterov(outer.outer_lr, outer.outer_momentum)
        self._codec = codec_by_name(scenario.codec)
        self._payload_bytes = self._codec.encoded_bytes(scenario.params)
        self._digest = Digest(0, 0, 0)
        self._failed, self._tries = False, 0
        self.reducer = Reducer(
            swarm,
            number,
            self._codec,
            lambda visit, decision, reduction: peers[visit.peer].answered(
                visit, decision, reduction
            ),
        )
        self._contributing: Contributing | None = None
        self._got: dict[int, Reduction] = {}
        self._streams: dict[tuple[int, int], Stream | None] = {}
        self._g = self.anchor
        self._fetching: tuple[Stream, Act] | None = None

    def start(self) -> None:
        """From the beginning of the run."""
        self.reducer.viewed()
        self.reducer.advanced(0, self._group)
        self.compute()

    # ---------------------------------------------------------------------------- the train side

    def begin(self) -> None:
        if self._repair(self.begin):
            return
        config, now = self.swarm.config, self.now
        deadline = now + config.round_s(self._payload_bytes, self.swarm.detection_s())
        self._tries += 1
        self._got, self._g = {}, self.anchor - self.local
        self._streams = {}
        machine = self._contributing = Contributing(
            self.me,
            0,
            self._version,
            orders(self._group),
            self.swarm.view(self.number),
            config,
            deadline,
        )
        self.at(deadline, lambda: self._contribute(machine, RoundTick()))
        self._contribute(machine, RoundTick())

    def _end(self, reason: str) -> None:
        waited_s = self.waited()
        self.account.rounds += 1
        self._contributing = None
        self._failed = bool(reason)
        if reason:
            self.account.failed(reason)
            self.later(_REPAIR_S, self._after_failure)
            return
        self.account.syncs_s.append(waited_s)
        shards = [self._got[shard] for shard in sorted(self._got)]
        of_value = [shards[k * len(shards) // VALUES] for k in range(VALUES)]
        mean = torch.stack([shard.mean[k] for k, shard in enumerate(of_value)])
        old = self.anchor
        self.anchor, self.momentum = self._outer.step(old, self.momentum, mean)
        counted = torch.tensor([self.me in shard.contributors for shard in of_value])
        kept = carry_over(self.local, old, self.anchor)
        self.local = torch.where(counted, self.anchor, kept)
        contributors = min(len(shard.contributors) for shard in shards)
        self._commit(self._version + 1, contributors, shards[0].next_group)
        self._go_on()

    def _after_failure(self) -> None:
        if not self._repair(self._go_on):
            self._go_on()

    def _go_on(self) -> None:
        self.waited()
        if self._version < self.swarm.scenario.rounds:
            self.compute()
        elif not self.done:
            self.finish()

    def _commit(self, version: int, contributors: int, group: Group) -> None:
        self._version, self._group, self._failed = version, group, False
        state = repr((group, self.anchor.tolist(), self.momentum.tolist()))
        self._digest = Digest(version, contributors, zlib.crc32(state.encode()))
        done = version >= self.swarm.scenario.rounds
        phase = Phase.DONE if done else Phase.TRAINING
        self.swarm.advanced(self.number, self._digest, phase)
        self.reducer.advanced(version, group)

    def _repair(self, then: Act) -> bool:
        """Fetches another's state if that is due; does `then` when it is here."""
        failed = frozenset({0} if self._failed else ())
        due = choose_repair((self._digest,), self.swarm.members(self.number), failed)
        if due is None:
            return False
        donor = self._peers[int(due.donor.peer[1:])]
        stream = self.swarm.network.open(self.number, donor.number, 1)
        self._fetching = (stream, then)
        stream.send(self.number, lambda: donor.asked(stream))
        return True

    def asked(self, stream: Stream) -> None:
        """Somebody fetches this peer's state: anchor and momentum, as they are now."""
        state = (self._digest, self._group, self.anchor, self.momentum)
        fetcher, size = self._peers[stream.caller], 8 * self.swarm.scenario.params
        stream.send(self.number, lambda: fetcher.fetched(stream, state), size)

    def fetched(self, stream: Stream, state: _State) -> None:
        """The other's state is here; what was learned since the own anchor is kept."""
        stream.close()
        assert self._fetching is not None, "one state is fetched at a time"
        then, self._fetching = self._fetching[1], None
        digest, group, anchor, momentum = state
        self.local = carry_over(self.local, self.anchor, anchor)
        self.anchor, self.momentum = anchor, momentum
        self._commit(digest.version, digest.contributors, group)
        if self._version >= self.swarm.scenario.rounds:
            self._go_on()
        else:
            then()

    # ------------------------------------------------------------------------- membership, streams

    def viewed(self, changed: frozenset[str]) -> None:
        view = self.swarm.view(self.number)
        self.reducer.viewed()
        if self._contributing is not None:
            self._contribute(self._contributing, ViewUpdated(view))

    def broken(self, stream: Stream) -> None:
        if self._fetching is not None and self._fetching[0] is stream:
            then, self._fetching = self._fetching[1], None
            self.later(_REPAIR_S, then)
            return
        if stream.caller != self.number:
            return
        machine = self._contributing
        for (shard, attempt), open_ in list(self._streams.items()):
            if open_ is stream and machine is not None:
                self._report(machine, own.Broken(shard, attempt, "a stream broke", link=True))

    # -------------------------------------------------------------------------- contributing side

    def _contribute(self, machine: Contributing, event: own.Event) -> None:
        if machine is not self._contributing:
            return
        for action in machine.step(event, self.now):
            match action:
                case own.OpenExchange(key, peer, attempt, _):
                    self._open(machine, key, int(peer[1:]), attempt)
                case own.CancelExchange(key, attempt):
                    stream = self._streams.pop((key.shard, attempt), None)
                    if stream is not None:
                        self.swarm.network.abort(stream, self.number)
                case Suspect():
                    pass
                case Succeeded():
                    self._end("")
                case Failed(reason, _):
                    self._end(reason)

    def _open(self, machine: Contributing, key: ShardKey, peer: int, attempt: int) -> None:
        size = shard_bytes(self._codec, self.swarm.scenario.params, key.shard, len(self._group))
        visit = Visit(key, self.number, attempt, self._group, self._g, self._tries, size, None)
        reducer = self._peers[peer].reducer
        if peer == self.number:
            self._streams[key.shard, attempt] = None
            visit.here = True
            self.later(0.0, lambda: reducer.visited(visit))
            return
        stream = self.swarm.network.open(self.number, peer, attempt)
        self._streams[key.shard, attempt] = visit.stream = stream
        before = reducer.has(visit)
        stream.send(self.number, lambda: reducer.visited(visit))
        stream.send(
            self.number,
            lambda: reducer.took(visit),
            round(size - before),
            lambda came: reducer.keep(visit, before + came),
        )

    def _report(self, machine: Contributing, event: _Report) -> None:
        """A try has ended with this."""
        if machine is not self._contributing:
            return
        if (event.shard, event.attempt) not in self._streams:
            return
        del self._streams[event.shard, event.attempt]
        self._contribute(machine, event)
        if isinstance(event, own.Broken):
            self.later(self.swarm.config.retry_s, lambda: self._contribute(machine, RoundTick()))

    def answered(
        self, visit: Visit, decision: shared.Decision, reduction: Reduction | None
    ) -> None:
        """The reducer has spoken."""
        machine, shard, attempt = self._contributing, visit.key.shard, visit.attempt
        if visit.stream is not None:
            visit.stream.close()
        if machine is None or machine.round != visit.key.round or visit.tries != self._tries:
            return
        match decision:
            case shared.RedirectTo(peer):
                self._report(machine, own.Redirected(shard, attempt, peer))
            case shared.Refuse("again", reason):
                self._report(machine, own.Broken(shard, attempt, reason, link=False))
            case shared.Refuse(_, reason):
                self._report(machine, own.Refused(shard, attempt, reason))
            case _:
                assert reduction is not None, "an answer has a reduction"
                if (shard, attempt) in self._streams:
                    self._got[shard] = reduction
                    self.reducer.learned(visit.key, reduction)
                    self._report(machine, own.Reduced(shard, attempt))
