"""Puts the I/O thread's components together: each is told of views, time and the end.

What a peer answers stands in the tables of its `NodeServer`. The train thread's messages come in by
`deliver`, and leave by its mailbox.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Container, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random, SystemRandom
from typing import Any

from murmuration.algorithms.codecs import codec_by_name
from murmuration.algorithms.fragments import Fragment
from murmuration.protos import murmuration_pb2 as pb
from murmuration.protos.addresses import public_address, with_port
from murmuration.protos.events import Log, Warnings, new_event
from murmuration.protos.figures import shown
from murmuration.worker import wire
from murmuration.worker.background import Component, Offload
from murmuration.worker.catchup import bootstrap, donors, held_states
from murmuration.worker.config import Config
from murmuration.worker.errors import NotDialled
from murmuration.worker.exchange import measured, round_context
from murmuration.worker.exchange.allreduce.contributor import Contributor
from murmuration.worker.exchange.allreduce.final_average import FinalAverage
from murmuration.worker.exchange.allreduce.mean import Residuals
from murmuration.worker.exchange.allreduce.reducer import Reducer
from murmuration.worker.exchange.pairwise.pair_rounds import Pairs
from murmuration.worker.exchange.view import View
from murmuration.worker.folder import NOTHING, Remembered
from murmuration.worker.identity.authority import Credentials, Renewal
from murmuration.worker.identity.certificates import Identity
from murmuration.worker.identity.gate import Expulsions, Gate, KeyHolders
from murmuration.worker.identity.words import SignedWords
from murmuration.worker.leases import Ledger
from murmuration.worker.leases.lease_service import LeaseService
from murmuration.worker.manifest import Manifest
from murmuration.worker.membership import Digest, Member, MemberLimits, Phase
from murmuration.worker.membership.first_contact import CoordinatorClient, FirstContact
from murmuration.worker.membership.gossip import GossipService
from murmuration.worker.membership.swim import MAX_MEMBERS, Membership
from murmuration.worker.node.answers import NodeServer
from murmuration.worker.node.own_address import ROUTER, Addresses
from murmuration.worker.pipeline.context import StageContext, StageCounts
from murmuration.worker.pipeline.stage_node import StageNode
from murmuration.worker.relay.relayed import RelayedPeer
from murmuration.worker.relay.router_port import RouterPort, UpnpRouter
from murmuration.worker.relay.service import RelayService, RelayTable
from murmuration.worker.relay.tunnels import Tunnels
from murmuration.worker.status.document import LagMonitor, RoundLog, status_document
from murmuration.worker.status.locator import FaultLocator, OwnFigures, to_document
from murmuration.worker.status.results import ResultExchange
from murmuration.worker.training import mailbox as mail
from murmuration.worker.transport import Method, Transport
from murmuration.worker.views import PagePlace

_MEMBERSHIP_TICK_S = 0.1
_ROUNDS_TICK_S = 0.05
_GIVE_BACK_S = 1.0
_KEEP_MEMBERS_S = 2.0
_MAX_TEXT = 500  # characters
_MOST_WARNINGS = 16
_FORWARD = "forward a port there by hand and say --advertise HOST:PORT, or listen on 0.0.0.0:7700"
_TOLD = frozenset({"warning", "refused", "round_failed", "member", "adopted"})


@dataclass(frozen=True, kw_only=True)
class NodeConfig(Addresses):
    """The settings of a node; addresses are HOST:PORT."""

    peer: str
    joins: tuple[str, ...] = ()  # to try, again and again until the run starts
    remembered: tuple[str, ...] = ()  # likewise, of a former life: anybody may answer there
    min_peers: int | None = 1  # to be ready before the start; None leaves that to the others
    wait_s: float = 120.0  # how long to wait for them
    proxy: str | None = None  # of HTTP CONNECT
    coordinator: str | None = None
    metrics: str | None = None
    page: PagePlace | None = None
    stage: int = 0
    stage_counts: StageCounts = field(default_factory=StageCounts)  # go on where the stage moves
    # (B, T, D) of the largest microbatch; None where the task does not say.
    activation_shape: tuple[int, int, int] | None = None
    ledger: Ledger = field(default_factory=Ledger)  # samples that are used already
    # What this peer's reductions have left out.
    residuals: Residuals = field(default_factory=Residuals)
    # Tells this process from earlier ones of the peer; None for the ms from 1970 to its start.
    start_ms: int | None = None


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The process around a node."""

    offload: Offload  # where heavy work runs
    log: Log
    clock: Callable[[], float] = time.monotonic  # seconds
    credentials: Credentials = field(default_factory=Credentials)
    rng: Random = field(default_factory=SystemRandom)  # draws what others must not know before
    router: UpnpRouter = field(default_factory=UpnpRouter)  # that the machine is behind


class Node:
    """One peer on the network. io thread only. Args: fragments: what is exchanged."""

    # From `listen` on.
    gossip: GossipService
    leases: LeaseService
    locator: FaultLocator
    results: ResultExchange
    stages: StageNode | None = None  # where the model is cut

    def __init__(
        self,
        *,
        node: NodeConfig,
        config: Config,
        manifest: Manifest,
        fragments: Sequence[Fragment],
        transport: Transport,
        mailbox: mail.Mailbox,
        environment: Environment,
    ) -> None:
        self._node, self._config, self._manifest = node, config, manifest
        self.transport, self.post, self._environment = transport, mailbox.answer, environment
        self.offload, self.clock = environment.offload, environment.clock
        self.rng, self.router = environment.rng, environment.router
        self._credentials = credentials = environment.credentials
        self._began_s = self.clock()
        self.warnings: dict[str, None] = {}  # the latest
        self.lag = LagMonitor(self.clock)
        self.context = round_context.Context(
            me=node.peer,
            run=manifest.run,
            elements=[each.elements for each in fragments],
            exact=[each.exact for each in fragments],
            plan=config.plan,
            compression=measured.Compression(config.exchange),
            arrivals=measured.Arrivals(self.clock),
            config=config.rounds,
            detection_s=config.membership.detection_s(max(2, node.min_peers or 2)),
            clock=self.clock,
            offload=self.offload,
            log=self.log,
            rng=self.rng,
            most_visits=config.stages.most_visits,
            on_caught=lambda: self.gossip.tick(),
        )
        refuse = self.context.counts.refuse
        gate = Gate(
            credentials.authority,
            offload=self.offload,
            refused=lambda: refuse("certificate"),
            key_of=lambda peer: None if self._words is None else self._words.key_of(peer),
            revoked=lambda who: self._expulsions is not None and self._expulsions.includes(who),
            log=self.log,
        )
        self.server = NodeServer(gate, refuse, Warnings(self.log))
        self.published: mail.Published | None = None  # what the train thread has committed
        self.held = held_states.HeldStates(self.context.exact)
        self._components: list[Component] = []
        self.server.calls |= {Method.STATUS: self._on_status, Method.MEASURE: self._on_measure}
        self.server.streams[Method.FETCH] = lambda stream: donors.serve_states(
            stream, manifest.run, self.published, self.held
        )
        self._pairs: Pairs | None = None
        self._coordinator: CoordinatorClient | None = None
        self._renewal: Renewal | None = None
        self._revoked = credentials.revoked()
        self._expulsions: Expulsions | None = None
        self._words: SignedWords | None = None
        self.tunnels = Tunnels(transport, node.peer, self.clock)
        transport.tunnel = self.tunnels.port
        self._from_train: asyncio.Queue[mail.ToIO] = asyncio.Queue()
        # What encodes, in its order, but beside these: stages and samples do not wait for it.
        self._turns: asyncio.Queue[Callable[[], Awaitable[None]]] = asyncio.Queue()
        self._progress: dict[str, object] = {}  # what the latest events of the training say
        self._rounds = RoundLog(self.clock)
        self._tried_since: dict[int, float] = {}  # by fragment: its next round, in vain so far
        self.figures = OwnFigures(node.peer, self.context.arrivals, self.clock)
        self._round_trips_s: dict[str, float] = {}
        self._fastest_s = 0.0
        self._others_at = 0  # a step of the schedule
        self._kept = NOTHING
        self._closing = asyncio.Event()
        self.close, self.deliver = self._closing.set, self._from_train.put_nowait
        # Returns when all that was delivered is dealt with, but for rounds that are to begin.
        self.settled = self._from_train.join
        self._group: asyncio.TaskGroup | None = None

    async def listen(self) -> str:
        """Starts serving and returns the advertised address. Raises AddressInUse, NotDialled."""
        bound = await self.transport.listen(self.server)
        node, run, transport = self._node, self._manifest.run, self.transport
        start_ms = time.time_ns() // 1_000_000 if node.start_ms is None else node.start_ms
        advertised = bound
        if node.advertise not in (None, ROUTER):  # port 0 stands for the one that is listened on
            advertised = with_port(node.advertise, bound)
            if node.advertise_origin and not transport.encrypted:
                advertised = public_address(advertised)  # there may be others elsewhere
        self.tunnels.own = (advertised, bound)
        self._add_membership(Member(node.peer, advertised, start_ms, stage=node.stage), bound)
        if node.advertise == ROUTER and not await self._router_port.begin(bound):
            await transport.close()
            raise NotDialled(f"--advertise {ROUTER}: {self._router_port.refused}; {_FORWARD}")
        address = self.gossip.me.address
        origin = {"origin": node.advertise_origin} if node.advertise_origin else {}
        self.log(new_event("listening", address=address, pid=os.getpid(), **origin))
        self._add_rounds()
        self.leases = LeaseService(run, self.gossip, self, node.ledger)
        in_turn = self._config.plan.exchange == "pairs"
        self.locator = FaultLocator(self.figures, self, in_turn=in_turn)
        self.results = ResultExchange(node.peer, run, self)
        self.server.calls[Method.LEASE] = self.leases.on_lease
        self.server.calls[Method.RESULT] = self.results.on_result
        self._components += [self.leases, self.locator, self.results]
        if self._config.stages.count > 1:
            self._add_stages()
        return address

    def _add_membership(self, me: Member, bound: str) -> None:
        config, node, run = self._config, self._node, self._manifest.run
        rng = Random(wire.hash64(f"{me.peer}/{me.start_ms}".encode()))
        limits = MemberLimits(
            steps=config.run.steps,
            fragments=len(self.context.elements),
            inner_steps=config.plan.inner_steps,
            stages=config.stages.count,
            stage=node.stage,
        )
        credentials, authority = self._credentials, self._credentials.authority

        def expelled(peer: str) -> None:
            gossip.expel(peer)
            self.server.end_streams_of(peer)

        def renewed(identity: Identity) -> None:
            self.transport.renew(identity)
            words.renewed(identity)

        def holders() -> list[str]:
            return [*self._configured, *(m.address for m in gossip.others if m.live)]

        if (identity := credentials.identity) is not None:
            more: dict[str, Any] = {"offload": self.offload, "log": self.log}
            words = self._words = SignedWords(identity, run, self.clock, Warnings(self.log).add)
            keep, ask = credentials.keep_revoked, KeyHolders(self.transport, holders).ask
            self._expulsions = Expulsions(identity, authority, expelled=expelled, keep=keep, **more)
            self._renewal = Renewal(
                identity, authority, ask=ask, keep=credentials.keep, renewed=renewed, **more
            )
        machine = Membership(me, config.membership, rng)
        gossip = GossipService(machine, run, limits, self, self._words, self._expulsions)
        self.gossip = gossip
        if self._expulsions is not None:
            self._expulsions.begin(self._revoked)
        self.server.peers = lambda: sum(member.live for member in gossip.members)
        self.server.calls[Method.GOSSIP] = gossip.on_gossip
        self.server.calls[Method.INDIRECT_PROBE] = gossip.on_indirect_probe
        relays = RelayTable(node.relay_mbps)
        self.relay = RelayService(relays, gossip, self.transport.encrypted, self.clock)
        self.server.streams |= self.relay.streams
        relayed = RelayedPeer(gossip, bound, self, self._round_trips_s.get)
        self._router_port = RouterPort(gossip, bound, self)
        self._components += [self.relay, relayed, self._router_port]
        ways = (self._router_port.begin, *([relayed.begin] if node.relayed else []))
        contact = FirstContact(gossip, self._manifest, self.transport, self.clock, self.log, ways)
        self._first_contact = contact
        self.server.calls_by[Method.JOIN] = contact.serve
        if node.coordinator:
            manifest = self._manifest.pack()
            self._coordinator = CoordinatorClient(node.coordinator, manifest, contact, self)

    @property
    def _configured(self) -> list[str]:
        return [*filter(None, [self._node.coordinator]), *self._node.joins]

    def _add_rounds(self) -> None:
        """Adds rounds, and a mean at the end: by a method of its own where replicas keep a rest."""
        means, gossip = self.context, self.gossip
        mean_rounds: type[Contributor] | type[FinalAverage] = Contributor
        if means.plan.exchange == "pairs":
            steps = self._config.run.steps
            schedule = means.plan.schedule(fragments=len(means.elements), steps=steps)
            self._pairs = Pairs(means, schedule, gossip, self, self.post, gossip.update)
            self.server.streams[Method.PAIR_ROUND] = self._pairs.serve
            means = replace(means, plan=means.plan.consensus_plan, ends_run=True)
            mean_rounds = FinalAverage
        reducer = Reducer(means, self._node.residuals)
        self._reducers = [reducer]
        self._final: Contributor | FinalAverage = mean_rounds(means, reducer, gossip, self)
        self._own_rounds = self._pairs or self._final
        self.server.streams[Method.EXCHANGE] = reducer.serve
        if means.plan.keeps and means.plan.consensus:
            exact = replace(means, plan=means.plan.consensus_plan, ends_run=True)
            final_reducer = Reducer(exact)
            self._reducers.append(final_reducer)
            self._final = Contributor(exact, final_reducer, gossip, self, Method.AVERAGE)
            self.server.streams[Method.AVERAGE] = final_reducer.serve
        self._components += [*self._reducers, *dict.fromkeys((self._final, self._own_rounds))]

    def _add_stages(self) -> None:
        config, gossip = self._config, self.gossip
        context = StageContext(
            me=self._node.peer,
            run=self._manifest.run,
            seed=config.run.seed,
            stage=self._node.stage,
            config=config.stages,
            codec=codec_by_name(config.stages.activations),
            transport=self.transport,
            members=lambda: gossip.members,
            suspect=gossip.suspect,
            post=self.post,
            offload=self.offload,
            clock=self.clock,
            log=self.log,
            counts=self._node.stage_counts,
            activation_shape=self._node.activation_shape,
        )
        self.stages = StageNode(context, publish=lambda profile: gossip.update(profile=profile))
        self.server.calls[Method.FINISHED] = self.stages.server.finished
        self.server.streams[Method.STAGE_CALL] = self.stages.server.serve
        self._components.append(self.stages)

    async def run(self) -> None:
        """Until `close`. Raises ManifestRefused, PeersUnreachable."""
        members = [self.gossip.tick, self._close_unneeded, self._tell_of_the_others]
        work = [
            _repeat(members, _MEMBERSHIP_TICK_S),
            _repeat([component.tick for component in self._components], _ROUNDS_TICK_S),
            self._read_messages(),
            self._take_turns(),
            bootstrap.Bootstrap(self._node, self._config.plan, self._first_contact, self).run(),
            self._keep_members(),
            self.lag.run(),
        ]
        if self._coordinator is not None:
            work.append(self._coordinator.run())
        if self._renewal is not None and self._expulsions is not None:
            work += [self._renewal.run(), self._expulsions.run()]
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                tasks = [group.create_task(each) for each in work]
                await self._closing.wait()
                while not self._from_train.empty():  # the result is the train thread's last message
                    await self._handle(self._from_train.get_nowait())
                if self._coordinator is not None:
                    await self._coordinator.leave()
                await self.leases.leave(_GIVE_BACK_S)
                await self.gossip.leave()
                await self._remember()
                for task in tasks:
                    task.cancel()
        finally:
            for component in reversed(self._components):
                await component.close()
            await self.tunnels.close()
            await self.transport.close()

    def _close_unneeded(self) -> None:
        needed = {*self._configured, *(m.address for m in self.gossip.members if m.live)}
        self.tunnels.close_unneeded(needed | self.transport.close_unneeded(needed))

    def _tell_of_the_others(self) -> None:
        plan = self._config.plan
        if self.stages is not None or plan.exchange != "mean" or plan.payload == "gradient":
            return
        training = [m for m in self.gossip.replicas if m.live and m.phase is Phase.TRAINING]
        steps = sorted(member.step for member in training)
        if steps and (step := steps[(len(steps) - 1) // 2]) != self._others_at:
            self._others_at = step
            self.post(mail.OthersWait(step))

    def status(self) -> dict[str, object]:
        own = self._config, self._progress, self._rounds, self._round_trips_s
        return status_document(self, *own, self.clock() - self._began_s)

    def measured(self) -> dict[str, object]:
        return to_document(self.figures.figures())

    async def _on_status(self, request: bytes) -> bytes:
        only = wire.parse(pb.StatusRequest, request).only
        measured = only == "measured"  # by every peer, often
        return wire.status_reply({"measured": self.measured()} if measured else self.status())

    async def _on_measure(self, _request: bytes) -> bytes:
        return pb.MeasureReply().SerializeToString()

    async def _read_messages(self) -> None:
        while True:
            await self._handle(await self._from_train.get())
            self._from_train.task_done()

    async def _keep_members(self) -> None:
        while True:
            await asyncio.sleep(_KEEP_MEMBERS_S)
            await self._remember()

    async def _remember(self) -> None:
        over = self.published is not None and self.published.phase is Phase.DONE
        found = tuple(m.address for m in sorted(self.gossip.others, key=lambda m: not m.live))
        known = Remembered(self._manifest.run, tuple(self._configured), found, over)
        if (folder := self._credentials.folder) is not None and found and known != self._kept:
            with suppress(OSError):  # a full disk is told by what is written besides
                await self.offload(partial(known.keep, folder))
                self._kept = known

    async def _take_turns(self) -> None:
        while True:
            await (await self._turns.get())()

    async def _handle(self, message: mail.ToIO) -> None:
        match message:
            case mail.Begin() as begin:
                self._rounds.began(begin.fragment, begin.round)
                self._tried_since.setdefault(begin.fragment, self.clock())
                rounds = self._final if begin.everyone else self._own_rounds
                if begin.leaves:
                    self._turns.put_nowait(self.gossip.retire)
                self._turns.put_nowait(partial(rounds.begin, begin))
            case mail.Published() as published:
                self._publish(published)
            case mail.IterationStarted() | mail.StageJobDone():
                if self.stages is not None:
                    await self.stages.handle(message)
            case mail.TrainingEvent(event):
                if event["event"] in ("progress", "validation"):
                    self._progress |= event
                elif event["event"] == "round":
                    self.figures.applied(event)
                self._rounds.told(event)
                if event["event"] == "progress":
                    event = {**event, "peers": sum(each.live for each in self.gossip.members)}
                self.log(event)
            case _:
                self.leases.handle(message)

    def _publish(self, published: mail.Published) -> None:
        before, self.published = self.published, published
        self.held.add(published.states)
        digests = tuple(Digest(s.version, s.contributors, s.hash) for s in published.states)
        phase, step, step_s = published.phase, published.step, published.step_s
        self.gossip.update(phase=phase, step=step, digests=digests, step_s=step_s)
        for index, state in enumerate(published.states):
            was = before.states[index] if before else None
            if was is None or was.version != state.version:
                self._tried_since.pop(index, None)
            if self._pairs is not None:
                if published.phase is Phase.TRAINING:
                    self._turns.put_nowait(partial(self._pairs.advanced, index, state))
                continue
            # Before the start there is no group: early contributions are held until there is.
            laid_out = was is not None and (was.version, was.group) == (state.version, state.group)
            if state.group and not laid_out:
                for reducer in self._reducers:
                    reducer.advanced(index, state.version, state.group)
                self.gossip.connect(state.group)

    def on_view(self, view: View) -> None:
        if self._config.plan.dylu and (fastest_s := view.fastest_step_s()) != self._fastest_s:
            self._fastest_s = fastest_s
            self.post(mail.FastestPace(fastest_s))
        for component in self._components:
            component.on_view(view)

    def on_round_trip(self, peer: str, seconds: float) -> None:
        if len(self._round_trips_s) >= MAX_MEMBERS:
            self._round_trips_s.clear()  # of peers that came and went; the others are timed again
        self._round_trips_s[peer] = seconds
        if self.stages is not None:
            self.stages.context.measurements.round_trip(peer, seconds)

    def on_refused(self, count: int) -> None:
        self.context.counts.refused.update(["member"] * count)

    def on_slow(self, kind: str) -> None:
        """Others lose time by this peer's machine, link or disk."""
        if self._config.plan.waits_for_nobody and kind in ("uplink", "downlink"):
            self.gossip.leave_out(self._node.peer)

    def finished(self, result: mail.RoundDone | mail.RoundFailed) -> None:
        fragment, round_, me = result.fragment, result.round, self._node.peer
        late = [p for reducer in self._reducers for p in reducer.take_late(fragment)]
        silent = list[str]()
        if isinstance(result, mail.RoundDone):
            most = 3 * result.contributors >= 2 * (1 + len(self.gossip.replicas))
            if self._config.plan.waits_for_nobody and result.missed and most:
                late += 2 * [me]
            self.held.took_part(fragment, round_, result.parts, result.received)
            self._rounds.completed(fragment, round_, result.exchange_s, result.waited_for)
            self.figures.round_ended()
        else:
            unanswered = [peer for peer in result.waiting_for if peer != me]
            tried_s = self.clock() - self._tried_since.get(fragment, self.clock())
            # Where most do not answer, what is wrong is this peer's own link. A peer that answers
            # at once that a round is over may be right.
            few = len(unanswered) <= max(1, len(self.gossip.replicas) // 2)
            if few and tried_s >= self.context.config.grace_s:
                silent = unanswered
            self._rounds.gave_up(fragment, round_, ", ".join(result.waiting_for))
        if self._pairs is None:
            self.gossip.round_ended(fragment, late, silent)
        else:
            for peer, was_late in self._pairs.take_met():
                self.gossip.round_ended(peer, [peer] * was_late, ())
        self.post(result)

    def give_up(self, fragment: int, reason: str) -> None:
        """Ends this peer's own rounds of a fragment, which a fetched state supersedes."""
        for rounds in dict.fromkeys((self._final, self._own_rounds)):
            rounds.give_up(fragment, reason)

    @property
    def partners(self) -> Container[str]:
        return self._pairs.partners if self._pairs is not None else ()

    def log(self, event: dict[str, object]) -> None:
        """Logs it. A text that a peer may have written is cut, and made fit for a terminal."""
        if event["event"] in _TOLD:
            event = {k: shown(v, _MAX_TEXT) if isinstance(v, str) else v for k, v in event.items()}
        if event["event"] == "warning":
            self.warnings[str(event["text"])] = None
            for text in list(self.warnings)[:-_MOST_WARNINGS]:
                del self.warnings[text]
        self._environment.log(event)

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        try:
            if self._group is None or self._closing.is_set():
                work.close()
            else:
                self._group.create_task(self._kept_apart(work))
        except RuntimeError:  # the group is ending: another of its tasks has failed
            work.close()

    async def _kept_apart(self, work: Coroutine[None, None, None]) -> None:
        try:
            await work
        except Exception as error:
            self.server.on_defect("an exchange", error)


async def _repeat(ticks: Sequence[Callable[[], None]], period_s: float) -> None:
    while True:
        for tick in ticks:
            tick()
        await asyncio.sleep(period_s)
