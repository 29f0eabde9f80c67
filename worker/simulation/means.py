"""A simulated peer whose rounds are leaderless means: what it applies, and when it takes over
another's state."""

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from algorithms.diloco import Nesterov, carry_over, keep_unsent, pseudo_gradient
from algorithms.plan import PRESETS
from worker.catchup.repair import choose_repair
from worker.membership import Digest, Phase
from worker.simulation.allreduce import MeanRounds
from worker.simulation.clock import Act
from worker.simulation.network import SimulatedStream
from worker.simulation.peer import Account
from worker.simulation.swarm import Group, Swarm
from worker.simulation.task import VALUES, Quadratic

_State = tuple[Digest, Group, Tensor, Tensor]

_REPAIR_S = 1.0  # between two tries to find somebody to take the state from


class MeanPeer(MeanRounds):
    """Args: peers: all of the swarm, by number."""

    def __init__(
        self,
        swarm: Swarm,
        number: int,
        task: Quadratic,
        account: Account,
        peers: "Sequence[MeanPeer]",
    ) -> None:
        super().__init__(swarm, number, task, account, peers)
        self._peers, self.version = peers, 0
        outer = PRESETS["diloco"]
        self._outer = Nesterov(outer.outer_lr, outer.outer_momentum)
        self._keeps = swarm.scenario.merge == "keep"
        self._sent = self.anchor, self.anchor  # the pseudo-gradient and its encoding's error
        self._digest = Digest(0, 0, 0)
        self._failed = False
        self._fetching: tuple[SimulatedStream, Act] | None = None

    def start(self) -> None:
        """From the beginning of the run."""
        self.viewed(frozenset())
        self.advanced(0, self._group)
        self.compute()

    def broken(self, stream: SimulatedStream) -> None:
        if self._fetching is None or self._fetching[0] is not stream:
            return super().broken(stream)
        then, self._fetching = self._fetching[1], None
        self.later(_REPAIR_S, then)
        return None

    def begin(self) -> None:
        if self._repair(self.begin):
            return
        g = sent = pseudo_gradient(self.anchor, self.local)
        if self._keeps:
            codec = self.layout.codec
            sent = codec.decode(codec.encode(g), VALUES)
        self._sent = g, g - sent
        self.begin_round(self.version, self._group, sent)

    def ended(self, reason: str) -> None:
        """The round has succeeded, or has failed for this reason."""
        waited_s = self.waited()
        self.account.rounds += 1
        self.contributor = None
        self._failed = bool(reason)
        if reason:
            self.account.failed(reason)
            self.later(_REPAIR_S, self._after_failure)
            return
        self.account.syncs_s.append(waited_s)
        shards = [self.got[shard] for shard in sorted(self.got)]
        of_value = [shards[k * len(shards) // VALUES] for k in range(VALUES)]
        mean = torch.stack([shard.mean[k] for k, shard in enumerate(of_value)])
        old = self.anchor
        self.anchor, self.momentum = self._outer.step(old, self.momentum, mean)
        counted = torch.tensor([self.me in shard.header.contributors for shard in of_value])
        kept = carry_over(self.local, old, self.anchor)
        merged = self.anchor
        if self._keeps:
            merged = keep_unsent(self.local, old, self.anchor, *self._sent)
        self.local = torch.where(counted, merged, kept)
        contributors = min(len(shard.header.contributors) for shard in shards)
        self.commit(self.version + 1, contributors, shards[0].header.next_group)
        self._go_on()

    def _after_failure(self) -> None:
        if not self._repair(self._go_on):
            self._go_on()

    def _go_on(self) -> None:
        self.waited()
        if self.version < self.swarm.scenario.rounds:
            self.compute()
        elif not self.done:
            self.finish()

    def commit(self, version: int, contributors: int, group: Group) -> None:
        """This peer's state is at `version`."""
        self.version, self._group, self._failed = version, group, False
        state = repr((group, self.anchor.tolist(), self.momentum.tolist()))
        self._digest = Digest(version, contributors, zlib.crc32(state.encode()))
        done = version >= self.swarm.scenario.rounds
        phase = Phase.DONE if done else Phase.TRAINING
        self.swarm.advanced(self.number, self._digest, phase)
        self.advanced(version, group)

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

    def asked(self, stream: SimulatedStream) -> None:
        """Somebody fetches this peer's state: anchor and momentum, as they are now."""
        state = (self._digest, self._group, self.anchor, self.momentum)
        fetcher, size = self._peers[stream.caller], 8 * self.swarm.scenario.params
        stream.send(self.number, lambda: fetcher.fetched(stream, state), size)

    def fetched(self, stream: SimulatedStream, state: _State) -> None:
        """The other's state is here; what was learned since the own anchor is kept."""
        stream.close()
        assert self._fetching is not None, "one state is fetched at a time"
        then, self._fetching = self._fetching[1], None
        digest, group, anchor, momentum = state
        self.local = carry_over(self.local, self.anchor, anchor)
        self.anchor, self.momentum = anchor, momentum
        self.commit(digest.version, digest.contributors, group)
        if self.version >= self.swarm.scenario.rounds:
            self._go_on()
        else:
            then()
