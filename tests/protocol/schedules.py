"""Rounds of a few peers on one heap, without payloads: the machines, and all that can go wrong.

A `World` plays what `worker.exchange` and `worker.training` do around the machines:
streams that take time and break, crashes, suspicions that differ from peer to peer, gossip that is
late. A contribution is a `Value` that says whose it is, so that every mean can be checked. One seed
gives one schedule.
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import count

from tests.protocol.schedule_parts import (
    Faults,
    Group,
    Outcome,
    Reduction,
    SimPeer,
    State,
    Stream,
    Value,
    orders,
)
from worker.exchange.allreduce import contributor as own
from worker.exchange.allreduce import reducer as shared
from worker.exchange.allreduce.contributor import Contributing
from worker.exchange.allreduce.reducer import Reducing
from worker.exchange.types import RoundConfig, ShardKey, View
from worker.membership import Digest, Health, Member, Phase

CONFIG = RoundConfig(quorum=0.5, grace_s=2.0, retry_s=0.25, slack_s=4.0)
TRANSFER_S = 0.2
DETECTION_S = 6.0
ROUND_S = 2 * TRANSFER_S + DETECTION_S + CONFIG.grace_s + CONFIG.slack_s
TICK_S = 0.25


class World:
    """One schedule. `play` runs it; `outcomes` and `closes` say what happened."""

    def __init__(self, peers: int, seed: int, faults: Faults, rounds: int = 2) -> None:
        self.rng = random.Random(seed)
        self.faults, self.rounds = faults, rounds
        self.now = 0.0
        self.outcomes: list[Outcome] = []
        self.closes: list[Reduction] = []
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        names = tuple("abcde"[:peers])
        self.peers = {name: self._peer(name, names) for name in names}

    def _peer(self, name: str, names: Group) -> SimPeer:
        members = {
            each: Member(each, each, 1, phase=Phase.TRAINING, digests=(Digest(0, 0, 0),))
            for each in names
        }
        return SimPeer(name, State(0, names), members, Reducing(name, orders, CONFIG, [TRANSFER_S]))

    # ------------------------------------------------------------------------------- the heap

    def play(self, limit_s: float = 120.0) -> None:
        """Until everyone that lives is done. Raises AssertionError when that takes too long."""
        for peer in self.peers.values():
            self._reduce(peer, shared.ViewUpdated(View(dict(peer.members))))
            self._reduce(peer, shared.Advanced(0, 0, peer.state.group))
            self.after(self.rng.uniform(0, 1), lambda peer=peer: self._begin(peer))
            self.after(self.rng.uniform(0, TICK_S), lambda peer=peer: self._tick(peer))
        self._plan_faults()
        while any(not (peer.done or peer.crashed) for peer in self.peers.values()):
            self.now, _, act = heapq.heappop(self._heap)
            assert self.now < limit_s, "the rounds never end"
            act()

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + delay_s, next(self._order), act))

    def _delay(self) -> float:
        return self.rng.uniform(0.005, 0.1)

    def _tick(self, peer: SimPeer) -> None:
        if peer.crashed:
            return
        self._reduce(peer, shared.RoundTick())
        self._contribute(peer, own.RoundTick())
        self.after(TICK_S, lambda: self._tick(peer))

    # --------------------------------------------------------------------------------- faults

    def _plan_faults(self) -> None:
        names, rng = sorted(self.peers), self.rng
        if self.faults.crash:
            victim = self.peers[rng.choice(names)]
            self.after(rng.uniform(0.0, 4.0), lambda: self._crash(victim))
        for _ in range(self.faults.suspicions):
            observer, victim_name = rng.sample(names, 2)
            ends_dead = rng.random() < self.faults.false_deaths
            self.after(
                rng.uniform(0.0, 4.0),
                lambda o=observer, v=victim_name, d=ends_dead: self._suspect(self.peers[o], v, d),
            )
        if self.faults.straggler:
            late = self.peers[rng.choice(names)]
            late.tries = -1  # its first begin is put off

    def _crash(self, victim: SimPeer) -> None:
        victim.crashed = True
        for peer in self.peers.values():
            for stream in [*peer.opened.values(), *peer.serving]:
                if victim in (stream.contributor, stream.reducer):
                    self.after(self._delay(), lambda s=stream: self._break(s))
            if peer is not victim:
                suspected_s = self.rng.uniform(0.5, 2.0)
                dead_s = suspected_s + self.rng.uniform(3.5, 4.0)
                for delay_s, health in ((suspected_s, Health.SUSPECT), (dead_s, Health.DEAD)):
                    self.after(
                        delay_s,
                        lambda p=peer, h=health: self._see(p, victim.name, health=h),
                    )

    def _suspect(self, observer: SimPeer, victim: str, ends_dead: bool) -> None:
        if self.peers[victim].crashed:
            return
        self._see(observer, victim, health=Health.SUSPECT)
        if ends_dead:
            self.after(2.0, lambda: self._see(observer, victim, health=Health.DEAD))
        self.after(
            self.rng.uniform(0.1, 2.0) + 2.0 * ends_dead, lambda: self._clear(observer, victim)
        )

    def _clear(self, observer: SimPeer, victim: str) -> None:
        if not self.peers[victim].crashed:
            self._see(observer, victim, health=Health.ALIVE)

    def _see(self, peer: SimPeer, other: str, **changes: object) -> None:
        if peer.crashed:
            return
        peer.members[other] = replace(peer.members[other], **changes)
        view = View(dict(peer.members))
        self._reduce(peer, shared.ViewUpdated(view))
        self._contribute(peer, own.ViewUpdated(view))

    def _gossip(self, peer: SimPeer) -> None:
        """Others hear later, and at different times, where this peer is."""
        digest = Digest(peer.state.version, 0, 0)
        phase = Phase.DONE if peer.done else Phase.TRAINING
        for other in self.peers.values():
            delay_s = 0.0 if other is peer else self.rng.uniform(0.0, 1.0)
            self.after(
                delay_s,
                lambda o=other: self._hear(o, peer.name, digest, phase),
            )

    def _hear(self, peer: SimPeer, other: str, digest: Digest, phase: Phase) -> None:
        if digest.version >= peer.members[other].digests[0].version:
            self._see(peer, other, digests=(digest,), phase=phase)

    # ---------------------------------------------------------------------------- the train side

    def _begin(self, peer: SimPeer) -> None:
        if peer.crashed or peer.done:
            return
        if peer.tries < 0:
            peer.tries = 0
            self.after(self.rng.uniform(4.0, 8.0), lambda: self._begin(peer))
            return
        state = peer.state
        peer.tries += 1
        peer.got, peer.began_at = {}, self.now
        peer.contributing = Contributing(
            peer.name,
            0,
            state.version,
            orders(0, state.group),
            View(dict(peer.members)),
            CONFIG,
            self.now + ROUND_S,
        )
        self._contribute(peer, own.RoundTick())

    def _end(self, peer: SimPeer, reason: str) -> None:
        assert peer.contributing is not None
        round_ = peer.contributing.round
        outcome = Outcome(peer.name, round_, peer.began_at, self.now, dict(peer.got), reason)
        self.outcomes.append(outcome)
        peer.contributing = None
        if outcome.succeeded:
            made_of = tuple(peer.got[shard] for shard in sorted(peer.got))
            self._commit(peer, State(round_ + 1, made_of[0].next_group, made_of))
            self.after(self.rng.uniform(0, 1), lambda: self._begin(peer))
        else:
            self.after(self.rng.uniform(0.25, 1.0), lambda: self._repair(peer))

    def _repair(self, peer: SimPeer) -> None:
        """After a failed round: another's state if it is better, then the next occasion."""
        if peer.crashed or peer.done:
            return
        states = [other.state for other in self.peers.values() if not other.crashed]
        best = max(states, key=lambda state: state.rank)
        if best.rank > peer.state.rank:
            self._commit(peer, best)
        self.after(self.rng.uniform(0, 1), lambda: self._begin(peer))

    def _commit(self, peer: SimPeer, state: State) -> None:
        peer.state = state
        peer.done = state.version >= self.rounds
        self._reduce(peer, shared.Advanced(0, state.version, state.group))
        self._gossip(peer)

    # ------------------------------------------------------------------------ contributing side

    def _contribute(self, peer: SimPeer, event: own.Event) -> None:
        machine = peer.contributing
        if machine is None or peer.crashed:
            return
        for action in machine.step(event, self.now):
            match action:
                case own.OpenExchange(key, target, attempt, _):
                    self._open(peer, machine, key, self.peers[target], attempt)
                case own.CancelExchange(key, attempt):
                    if stream := peer.opened.pop((key, attempt), None):
                        stream.phase = "ended"
                case own.Succeeded():
                    self._end(peer, "")
                case own.Failed(reason, _):
                    self._end(peer, reason)
                case own.Suspect():
                    pass

    def _open(
        self,
        peer: SimPeer,
        machine: Contributing,
        key: ShardKey,
        target: SimPeer,
        attempt: int,
    ) -> None:
        value = Value(peer.name, key, peer.tries)
        stream = Stream(peer, target, key, attempt, value, peer.state.group, machine)
        peer.opened[key, attempt] = stream
        here = target is peer
        self.after(0.0 if here else self._delay(), lambda: self._arrive(stream))
        if not here and self.rng.random() < self.faults.break_rate:
            self.after(self.rng.uniform(0.0, 0.4), lambda: self._break(stream))

    def _report(self, stream: Stream, event: own.Event) -> None:
        """The stream ends with this at its contributor."""
        peer = stream.contributor
        if stream.phase == "ended" or peer.crashed or peer.contributing is not stream.machine:
            return
        stream.phase = "ended"
        peer.opened.pop((stream.key, stream.attempt), None)
        self._contribute(peer, event)

    def _break(self, stream: Stream) -> None:
        shard, attempt = stream.key.shard, stream.attempt
        self._report(stream, own.Broken(shard, attempt, "the link broke", link=True))

    def _answer(self, stream: Stream, reduction: Reduction) -> None:
        """The reduction has reached its contributor."""
        peer = stream.contributor
        if stream.phase == "ended" or peer.crashed or peer.contributing is not stream.machine:
            return
        shard = stream.key.shard
        assert shard not in peer.got, "a shard was reduced twice for one peer"
        peer.got[shard] = reduction
        if stream.key not in peer.reductions:
            peer.reductions[stream.key] = reduction
            self._reduce(peer, shared.Closed(stream.key))
        self._report(stream, own.Reduced(shard, stream.attempt))

    # ----------------------------------------------------------------------------- reducing side

    def _reduce(self, peer: SimPeer, event: shared.Event) -> None:
        if peer.crashed:
            return
        for action in peer.reducing.step(event, self.now):
            match action:
                case shared.Compute(key, contributors, next_group):
                    self._compute(peer, key, contributors, next_group)
                case shared.Abandon(key, _):
                    peer.arriving.pop(key, None)
                case shared.Prune(_, round_):
                    self._forget(peer, range(round_))
                case shared.Discard(_, round_):
                    self._forget(peer, range(round_, round_ + 1))
        if not isinstance(event, shared.RoundTick):
            for stream in list(peer.serving):
                self._serve(stream)

    def _forget(self, peer: SimPeer, rounds: range) -> None:
        for kept in (peer.arriving, peer.reductions):
            for key in [key for key in kept if key.round in rounds]:
                del kept[key]

    def _compute(
        self, peer: SimPeer, key: ShardKey, contributors: Group, next_group: Group
    ) -> None:
        arriving = peer.arriving[key]
        values = tuple(arriving[name] for name in contributors)
        reduction = Reduction(key, peer.name, contributors, values, next_group)
        self.closes.append(reduction)

        def close() -> None:
            if peer.crashed or peer.arriving.get(key) is not arriving:
                return
            peer.reductions[key] = reduction
            peer.arriving.pop(key, None)
            self._reduce(peer, shared.Closed(key))

        self.after(self.rng.uniform(0.0, 0.05), close)

    def _arrive(self, stream: Stream) -> None:
        if stream.phase == "ended":
            return
        if stream.reducer.crashed:
            self.after(self._delay(), lambda: self._break(stream))
            return
        stream.reducer.serving.append(stream)
        self._serve(stream)

    def _serve(self, stream: Stream) -> None:
        """What `Reducer` does with a stream when something has changed."""
        peer, key = stream.reducer, stream.key
        if stream.phase == "ended" or peer.crashed:
            if stream in peer.serving:
                peer.serving.remove(stream)
            return
        if stream.phase == "deciding":
            self._decide(stream)
        elif stream.phase == "waiting":
            if key in peer.reductions:
                self._reply(stream, shared.Answer())
            elif key not in peer.arriving:
                decision = peer.reducing.offer(key, peer.reducing.group(0, key.round))
                if not isinstance(decision, shared.RedirectTo | shared.Refuse):
                    decision = shared.Refuse("again", "the shard has moved")
                self._reply(stream, decision)

    def _decide(self, stream: Stream) -> None:
        peer, key = stream.reducer, stream.key
        mine = peer.reducing.group(0, key.round)
        decision = peer.reducing.offer(key, mine if mine == stream.group else None)
        if isinstance(decision, shared.Hold):
            return
        if not isinstance(decision, shared.Accept):
            self._reply(stream, decision)
            return
        stream.phase = "sending"
        stream.arriving = peer.arriving.setdefault(key, {})
        earlier = stream.arriving.get(stream.value.peer)
        if earlier is not None and earlier != stream.value:
            del stream.arriving[earlier.peer]
            self._reduce(peer, shared.Withdrawn(key, earlier.peer))
        here = stream.contributor is peer
        self.after(0.0 if here else self._delay(), lambda: self._sent(stream))

    def _sent(self, stream: Stream) -> None:
        peer, key = stream.reducer, stream.key
        if stream.phase != "sending" or peer.crashed:
            return
        stream.phase = "waiting"
        if stream.arriving is not None and peer.arriving.get(key) is stream.arriving:
            stream.arriving[stream.value.peer] = stream.value
            self._reduce(peer, shared.Contributed(key, stream.value.peer))
        self._serve(stream)

    def _reply(self, stream: Stream, decision: shared.Decision) -> None:
        peer, shard, attempt = stream.reducer, stream.key.shard, stream.attempt
        stream.phase = "answering"
        if stream in peer.serving:
            peer.serving.remove(stream)
        delay_s = 0.0 if stream.contributor is peer else self._delay()
        match decision:
            case shared.Answer():
                reduction = peer.reductions[stream.key]
                self.after(delay_s, lambda: self._answer(stream, reduction))
                return
            case shared.RedirectTo(other):
                event: own.Event = own.Redirected(shard, attempt, other)
            case shared.Refuse("again", reason):
                event = own.Broken(shard, attempt, reason, link=False)
            case shared.Refuse(_, reason):
                event = own.Refused(shard, attempt, reason)
            case other_decision:
                raise AssertionError(other_decision)
        self.after(delay_s, lambda: self._report(stream, event))
