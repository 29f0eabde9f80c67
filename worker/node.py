"""What runs on the I/O thread, what this peer answers, and the mailbox's other end."""

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from algorithms.codecs import codec_by_name
from protos import murmuration_pb2 as pb
from worker import wire
from worker.catchup.bootstrap import Bootstrap
from worker.catchup.state_transfer import serve_states
from worker.config import Config
from worker.exchange.allreduce.contributor_io import Contributor
from worker.exchange.allreduce.final_average import FinalAverage
from worker.exchange.allreduce.reducer_io import Reducer
from worker.exchange.compression import Compression
from worker.exchange.context import Context, Offload
from worker.exchange.pairwise.io import Pairs
from worker.exchange.types import View
from worker.manifest import Manifest
from worker.membership import (
    Digest,
    Measured,
    Member,
    Membership,
    Phase,
    ProbeTick,
    Suspected,
    Updated,
)
from worker.membership.coordinator_client import CoordinatorClient
from worker.membership.io import GossipService
from worker.pipeline.context import StageContext, StageCounts
from worker.pipeline.node import StageNode
from worker.pipeline.rebalancing import StageExchange
from worker.status import LagMonitor, status_document
from worker.training.inbox import (
    Begin,
    FastestPace,
    IterationStarted,
    Mailbox,
    Published,
    RoundDone,
    RoundFailed,
    StageJobDone,
    ToIO,
    TrainingEvent,
)
from worker.transport import Stream, Transport, TransportError

_MEMBERSHIP_TICK_S = 0.1
_ROUNDS_TICK_S = 0.05


@dataclass(frozen=True, kw_only=True)
class NodeConfig:
    """Args:
    peer: this peer's name; advertise: the address others reach it at, None for the bound one.
    joins: addresses to try, again and again until the run starts.
    coordinator: address, or None.
    min_peers: how many must be ready before the run starts, None to leave that to the others;
    wait_s: how long to wait for them.
    stage: which part of the model this peer serves.
    stage_counts: of visits; they go on where a peer moves to another stage.
    epoch: tells a life of the peer from its earlier ones; None for the ms from 1970 to its start.
    """

    peer: str
    advertise: str | None = None
    joins: tuple[str, ...] = ()
    coordinator: str | None = None
    min_peers: int | None = 1
    stage: int = 0
    wait_s: float = 120.0
    stage_counts: StageCounts = field(default_factory=StageCounts)
    epoch: int | None = None


class Node:
    """One peer on the network. io thread only."""

    def __init__(
        self,
        *,
        node: NodeConfig,
        config: Config,
        manifest: Manifest,
        elements: Sequence[int],
        transport: Transport,
        mailbox: Mailbox,
        offload: Offload,
        log: Callable[[dict[str, object]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node, self._config, self._manifest = node, config, manifest
        self._transport, self._mailbox, self._offload = transport, mailbox, offload
        self._log_event, self._clock, self._began_s = log, clock, clock()
        self.lag = LagMonitor(clock)
        self.context = Context(
            me=node.peer,
            run=manifest.run,
            elements=elements,
            plan=config.plan,
            compression=Compression(config.exchange),
            config=config.rounds,
            detection_s=config.membership.detection_s(max(2, node.min_peers or 2)),
            clock=clock,
            offload=offload,
            log=self._log,
            most_visits=config.stages.most_visits,
        )
        means = self.context
        self._pairs: Pairs | None = None
        if config.plan.exchange == "pairs":
            schedule = config.plan.schedule(fragments=len(elements), steps=config.run.steps)
            self._pairs = Pairs(
                self.context,
                schedule,
                transport,
                self._address_of,
                self._finished,
                self._mailbox.answer,
                self._doubt,
            )
            means = replace(self.context, plan=config.plan.consensus_plan)
        self._reducer = Reducer(means)
        rounds_over_all = Contributor if self._pairs is None else FinalAverage
        self._contributor: Contributor | FinalAverage = rounds_over_all(
            means, self._reducer, transport, self._address_of, self._finished, self._doubt
        )
        self._gossip: GossipService | None = None
        self._stages: StageNode | None = None
        self._introduction: CoordinatorClient | None = None
        self._inbox: asyncio.Queue[ToIO] = asyncio.Queue()
        self._published: Published | None = None
        self._progress: dict[str, object] = {}
        self._rounds = {"completed": 0, "failed": 0}
        self._fastest_s = 0.0
        self._closing = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None

    @property
    def stages(self) -> StageNode | None:
        """What serves a stage here, where the model is cut."""
        return self._stages

    @property
    def gossip(self) -> GossipService:
        assert self._gossip is not None, "listen() comes first"
        return self._gossip

    # ------------------------------------------------------------------------------- life cycle

    async def listen(self) -> str:
        """Starts serving and returns the advertised address. Raises AddressInUse."""
        bound = await self._transport.listen(self)
        node, manifest = self._node, self._manifest
        epoch = time.time_ns() // 1_000_000 if node.epoch is None else node.epoch
        member = Member(node.peer, node.advertise or bound, epoch, stage=node.stage)
        rng = random.Random(wire.hash64(f"{member.peer}/{member.epoch}".encode()))
        self._gossip = GossipService(
            Membership(member, self._config.membership, rng),
            manifest,
            self._transport,
            self._clock,
            self._spawn,
            self._viewed,
            self._log,
            self._timed,
        )
        if self._config.stages.count > 1:
            self._stages = self._make_stages()
        if node.coordinator:
            self._introduction = CoordinatorClient(
                node.coordinator,
                manifest.pack(),
                self._gossip,
                self._transport,
                started=lambda: self._published is not None,
            )
        return member.address

    async def run(self) -> None:
        """Everything, until `close`. Raises ManifestRefused, PeersUnreachable."""
        joining = Bootstrap(
            joins=self._node.joins,
            min_peers=self._node.min_peers,
            wait_s=self._node.wait_s,
            plan=self._config.plan,
            run=self._manifest.run,
            gossip=self.gossip,
            transport=self._transport,
            mailbox=self._mailbox,
            offload=self._offload,
            published=lambda: self._published,
            give_up=self._give_up,
            partners=lambda: self._pairs.partners if self._pairs is not None else (),
            clock=self._clock,
            log=self._log,
        )
        work = [self._tick(), self._tick_rounds(), self._take_mail(), joining.run(), self.lag.run()]
        if self._introduction is not None:
            work.append(self._introduction.run(self._log))
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                tasks = [group.create_task(each) for each in work]
                await self._closing.wait()
                while not self._inbox.empty():  # the result is the last word of the train thread
                    await self._take(self._inbox.get_nowait())
                if self._introduction is not None:
                    await self._introduction.flush()
                await self.gossip.leave()
                for task in tasks:
                    task.cancel()
        finally:
            if self._pairs is not None:
                await self._pairs.close()
            if self._stages is not None:
                await self._stages.close()
            await self._contributor.close()
            await self._reducer.close()
            await self._transport.close()

    def close(self) -> None:
        """Leaves the swarm and ends `run`."""
        self._closing.set()

    # ---------------------------------------------------------------------------------- serving

    async def on_call(self, method: str, request: bytes) -> bytes:
        """Answers one control call. Raises WireError."""
        match method:
            case "Control/Gossip":
                return self.gossip.on_gossip(request)
            case "Control/Join":
                return await self.gossip.on_join(request)
            case "Control/IndirectProbe":
                return await self.gossip.on_indirect_probe(request)
            case "Control/Status":
                return wire.status_reply(self.status())
            case "Control/Measure":
                return pb.MeasureReply().SerializeToString()
            case "Control/Finished" if self._stages is not None:
                return await self._stages.on_call(method, request)
            case _:
                raise wire.WireError(f"no method {method}")

    async def on_stream(self, method: str, stream: Stream) -> None:
        """Serves one data stream."""
        with suppress(TransportError, TimeoutError):
            match method:
                case "Data/Exchange":
                    await self._reducer.serve(stream)
                case "Data/Meet":
                    if self._pairs is not None:
                        await self._pairs.serve(stream)
                case "Data/StageCall":
                    if self._stages is not None:
                        await self._stages.serve(method, stream)
                case _:
                    await serve_states(stream, self._manifest.run, self._published)

    def status(self) -> dict[str, object]:
        """What `murmur status` shows: plain values."""
        return status_document(
            config=self._config,
            context=self.context,
            gossip=self.gossip,
            traffic=self._transport.traffic,
            rounds=self._rounds,
            loss=self._progress.get("loss"),
            lag=self.lag,
            up_s=self._clock() - self._began_s,
        )

    # ------------------------------------------------------------------------- the train thread

    def deliver(self, message: ToIO) -> None:
        """Takes a message of the train thread; on the loop's thread."""
        self._inbox.put_nowait(message)

    async def _take_mail(self) -> None:
        while True:
            await self._take(await self._inbox.get())

    async def _take(self, message: ToIO) -> None:
        match message:
            case Begin() as begin:
                rounds = self._contributor if begin.everyone else self._pairs or self._contributor
                await rounds.begin(begin)
            case Published() as published:
                await self._take_published(published)
            case IterationStarted() | StageJobDone() if self._stages is not None:
                await self._stages.handle(message)
            case TrainingEvent(event):
                if event["event"] == "progress":
                    self._progress = event
                self._log(event)

    async def _take_published(self, published: Published) -> None:
        before, self._published = self._published, published
        digests = tuple(Digest(s.version, s.contributors, s.hash) for s in published.states)
        self.gossip.step(Updated(published.phase, published.step, digests, published.step_s))
        old = before.states if before else (None,) * len(published.states)
        for index, (was, state) in enumerate(zip(old, published.states, strict=True)):
            if self._pairs is not None:
                if published.phase is Phase.TRAINING:
                    await self._pairs.advanced(index, state)
                continue
            # Before the start there is no group: early contributions are held until there is.
            if state.group and (
                was is None or (was.version, was.group) != (state.version, state.group)
            ):
                self._reducer.advanced(index, state.version, state.group)
                for address in map(self._address_of, state.group):
                    if address is not None and address != self.gossip.me.address:
                        self._transport.connect(address)

    def _finished(self, result: RoundDone | RoundFailed) -> None:
        self._rounds["completed" if isinstance(result, RoundDone) else "failed"] += 1
        self._mailbox.answer(result)

    # ---------------------------------------------------------------------------------- helpers

    def _make_stages(self) -> StageNode:
        config = self._config
        context = StageContext(
            me=self._node.peer,
            run=self._manifest.run,
            seed=config.run.seed,
            stage=self._node.stage,
            config=config.stages,
            codec=codec_by_name(config.stages.activations),
            transport=self._transport,
            members=lambda: self.gossip.members,
            suspect=self._doubt,
            post=self._mailbox.answer,
            offload=self._offload,
            clock=self._clock,
            log=self._log,
            counts=self._node.stage_counts,
        )
        return StageNode(
            context,
            StageExchange.of(config.plan, config.stages, self._manifest.elements),
            publish=lambda profile: self.gossip.step(Measured(profile)),
        )

    def _address_of(self, peer: str) -> str | None:
        return self.gossip.address_of(peer)

    def _timed(self, peer: str, seconds: float) -> None:
        if self._stages is not None:
            self._stages.context.measurements.round_trip(peer, seconds)

    def _doubt(self, peer: str) -> None:
        self.gossip.step(Suspected(peer))

    def _give_up(self, fragment: int, reason: str) -> None:
        self._contributor.give_up(fragment, reason)
        if self._pairs is not None:
            self._pairs.give_up(fragment, reason)

    def _viewed(self, view: View) -> None:
        fastest_s = view.fastest_step_s()
        if self._config.plan.dylu and fastest_s != self._fastest_s:
            self._fastest_s = fastest_s
            self._mailbox.answer(FastestPace(fastest_s))
        self._reducer.viewed(view)
        self._contributor.viewed(view)
        if self._pairs is not None:
            self._pairs.viewed(view)
        if self._stages is not None:
            self._stages.on_view()

    async def _tick(self) -> None:
        while True:
            self.gossip.step(ProbeTick())
            await asyncio.sleep(_MEMBERSHIP_TICK_S)

    async def _tick_rounds(self) -> None:
        while True:
            self._reducer.tick()
            self._contributor.tick()
            if self._pairs is not None:
                self._pairs.tick()
            if self._stages is not None:
                self._stages.tick()
            await asyncio.sleep(_ROUNDS_TICK_S)

    def _log(self, event: dict[str, object]) -> None:
        """To the log, and to the coordinator if there is one."""
        self._log_event(event)
        if self._introduction is not None:
            self._introduction.add(event)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        try:
            if self._group is None or self._closing.is_set():
                work.close()
            else:
                self._group.create_task(work)
        except RuntimeError:  # the group is ending: another of its tasks has failed
            work.close()
