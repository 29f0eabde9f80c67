"""The I/O thread's tasks: membership, rounds, repair, and what this peer answers to others."""

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from algorithms.codecs import codec_by_name
from protos import murmuration_pb2 as pb
from worker import wire
from worker.config import Config
from worker.errors import ManifestRefused, PeersUnreachable
from worker.exchange import Context, Contributor, Offload, Reducer
from worker.lag import LagMonitor
from worker.mailbox import (
    Adopt,
    Begin,
    Mailbox,
    Progress,
    Published,
    RoundDone,
    RoundFailed,
    Started,
    ToIO,
)
from worker.manifest import Manifest, first_difference
from worker.membership import (
    AskProbe,
    Card,
    Digest,
    Doubted,
    Event,
    Health,
    Heard,
    Leaving,
    Membership,
    Phase,
    Probe,
    Probed,
    ProbedFor,
    Tick,
    Updated,
    ViewChanged,
)
from worker.rounds import View, choose_repair
from worker.states import fetch_states, serve_states, sizes_of
from worker.transport import Stream, Transport, TransportError

_MEMBERSHIP_TICK_S = 0.1
_ROUNDS_TICK_S = 0.05
_REPAIR_S = 0.25
_HINT_S = 0.5
_COORDINATOR_S = 1.0
_CALL_S = 2.0
_MAX_EVENTS = 64


@dataclass(frozen=True, kw_only=True)
class NodeConfig:
    """Args:
    peer: this peer's name; advertise: the address others reach it at, None for the bound one.
    joins: addresses to try, again and again until the run starts.
    coordinator: address, or None.
    min_peers: how many must be ready before the run starts.
    wait_s: how long to wait for them.
    """

    peer: str
    advertise: str | None = None
    joins: tuple[str, ...] = ()
    coordinator: str | None = None
    min_peers: int = 1
    wait_s: float = 120.0


@dataclass
class _Status:
    """What the train thread told us last."""

    published: Published | None = None
    last_progress: dict[str, object] = field(default_factory=dict)
    rounds_completed: int = 0
    rounds_failed: int = 0


class Node:
    """One peer on the network. io thread only, but for `deliver`."""

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
        self._transport, self._mailbox, self._clock = transport, mailbox, clock
        self._offload, self._log_event = offload, log
        self._elements = elements
        self.run_id = manifest.run
        self._packed_manifest = manifest.pack()
        self.lag = LagMonitor(clock)
        self.context = Context(
            me=node.peer,
            run=self.run_id,
            elements=elements,
            codec=codec_by_name(config.plan.codec),
            reduction_codec=codec_by_name(config.plan.reduction_codec),
            config=config.rounds,
            detection_s=config.membership.detection_s(max(2, node.min_peers)),
            clock=clock,
            offload=offload,
            log=self._log,
        )
        self._reducer = Reducer(self.context)
        self._contributor = Contributor(
            self.context, self._reducer, transport, self._address_of, self._finished, self._doubt
        )
        self._membership: Membership | None = None
        self._inbox: asyncio.Queue[ToIO] = asyncio.Queue()
        self._events: list[dict[str, object]] = []
        self._status = _Status()
        self._contacts: dict[str, str] = {}
        self._closing = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None

    # ------------------------------------------------------------------------------- life cycle

    async def listen(self) -> str:
        """Starts serving and returns the advertised address. Raises AddressInUse."""
        bound = await self._transport.listen(self)
        address = self._node.advertise or bound
        card = Card(self._node.peer, address, epoch=time.time_ns() // 1_000_000)
        seed = wire.hash64(f"{self._node.peer}/{card.epoch}".encode())
        self._membership = Membership(card, self._config.membership, random.Random(seed))
        return address

    async def run(self) -> None:
        """Everything, until `close`. Raises ManifestRefused, PeersUnreachable."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            tasks = [
                group.create_task(work)
                for work in (
                    self._every(_MEMBERSHIP_TICK_S, self._tick_membership),
                    self._every(_ROUNDS_TICK_S, self._tick_rounds),
                    self._take_mail(),
                    self._start(),
                    self.lag.run(),
                    *([self._keep_coordinator_told()] if self._node.coordinator else []),
                )
            ]
            await self._closing.wait()
            await self._leave()
            for task in tasks:
                task.cancel()
        await self._contributor.close()
        await self._reducer.close()
        await self._transport.close()

    def close(self) -> None:
        """Leaves the swarm and ends `run`."""
        self._closing.set()

    def deliver(self, message: ToIO) -> None:
        """Takes a message of the train thread; on the loop's thread."""
        self._inbox.put_nowait(message)

    @property
    def cards(self) -> tuple[Card, ...]:
        return self._known.cards

    # ---------------------------------------------------------------------------------- serving

    async def on_call(self, method: str, request: bytes) -> bytes:
        """Answers one control call."""
        match method:
            case "Control/Gossip":
                gossip = wire.parse(pb.GossipMessage, request)
                if gossip.run == self.run_id:
                    self._step(Heard(wire.cards_from_messages(gossip.members)))
                return self._gossip().SerializeToString()
            case "Control/Join":
                return self._on_join(wire.parse(pb.JoinRequest, request)).SerializeToString()
            case "Control/ProbeFor":
                asked = wire.parse(pb.ProbeRequest, request)
                alive = await self._exchange_gossip(asked.address, min(asked.timeout_s, 10.0))
                return pb.ProbeReply(alive=alive).SerializeToString()
            case "Control/Status":
                document = wire.pack_document(self.status())
                return pb.StatusReply(document=document).SerializeToString()
            case _:
                raise wire.WireError(f"no method {method}")

    async def on_stream(self, method: str, stream: Stream) -> None:
        """Serves one data stream."""
        with suppress(TransportError, TimeoutError):
            if method == "Data/Exchange":
                await self._reducer.serve(stream)
            else:
                await serve_states(stream, self.run_id, self._status.published)

    def status(self) -> dict[str, object]:
        """What `murmur status` shows: plain values."""
        traffic, counts = self._transport.traffic, self.context.counts
        me = self._known.me
        return {
            "kind": "worker",
            "peer": me.peer,
            "run": f"{self.run_id:016x}",
            "phase": me.phase.name.lower(),
            "step": me.step,
            "steps": self._config.run.steps,
            "preset": self._config.preset,
            "loss": self._status.last_progress.get("loss"),
            "members": [
                {
                    "peer": card.peer,
                    "address": card.address,
                    "health": card.health.name.lower(),
                    "phase": card.phase.name.lower(),
                    "step": card.step,
                    "versions": [digest.version for digest in card.digests],
                }
                for card in self.cards
            ],
            "traffic": {
                "bytes_sent": traffic.sent_bytes,
                "bytes_received": traffic.received_bytes,
                "payload_bytes_sent": counts.payload_sent_bytes,
                "payload_bytes_received": counts.payload_received_bytes,
                "by_method": dict(traffic.sent),
            },
            "rounds": {
                "completed": self._status.rounds_completed,
                "failed": self._status.rounds_failed,
                "late": counts.late,
                "takeovers": counts.takeovers,
            },
            "refused": dict(counts.refused),
            "loop_lag_ms": self.lag.summary_ms(),
        }

    def _on_join(self, request: pb.JoinRequest) -> pb.JoinReply:
        if not request.manifest:
            return pb.JoinReply(manifest=self._packed_manifest)
        if refusal := self._refusal(request.manifest):
            return pb.JoinReply(refusal=refusal, manifest=self._packed_manifest)
        self._step(Heard((wire.card_from_message(request.card),)))
        return pb.JoinReply(members=[wire.card_to_message(card) for card in self.cards])

    def _refusal(self, packed: bytes) -> str:
        theirs = Manifest.unpack(packed)
        if theirs.run == self.run_id:
            return ""
        difference = first_difference(theirs.document, self._manifest.document)
        return f"the manifests differ in {difference}"

    # ------------------------------------------------------------------------------- membership

    @property
    def _known(self) -> Membership:
        assert self._membership is not None, "listen() comes first"
        return self._membership

    def _step(self, event: Event) -> None:
        for action in self._known.step(event, self._clock()):
            match action:
                case Probe(peer, address, timeout_s):
                    self._spawn(self._probe(peer, address, timeout_s))
                case AskProbe(via, peer, address, timeout_s):
                    self._spawn(self._ask_probe(via, peer, address, timeout_s))
                case ViewChanged():
                    self._view_changed()
        if isinstance(event, Heard | Updated):
            self._view_changed(quietly=True)

    def _view_changed(self, *, quietly: bool = False) -> None:
        view = View({card.peer: card for card in self.cards})
        if not quietly:
            for card in self.cards:
                was = self._contacts.get(card.peer)
                now = card.health.name.lower()
                if was != now and card.peer != self._node.peer:
                    self._contacts[card.peer] = now
                    self._log({"event": "member", "peer_changed": card.peer, "health": now})
        self._reducer.viewed(view)
        self._contributor.viewed(view)

    def _gossip(self) -> pb.GossipMessage:
        return pb.GossipMessage(
            sender=self._node.peer,
            run=self.run_id,
            members=[wire.card_to_message(card) for card in self.cards],
        )

    async def _exchange_gossip(self, address: str, timeout_s: float) -> bool:
        """Push-pull with one address; False when it does not answer or runs something else."""
        try:
            raw = await self._transport.call(
                address, "Control/Gossip", self._gossip().SerializeToString(), timeout_s
            )
            answer = wire.parse(pb.GossipMessage, raw)
            if answer.run != self.run_id:
                return False
            self._step(Heard(wire.cards_from_messages(answer.members)))
        except (TransportError, wire.WireError):
            return False
        return True

    async def _probe(self, peer: str, address: str, timeout_s: float) -> None:
        self._step(Probed(peer, await self._exchange_gossip(address, timeout_s)))

    async def _ask_probe(self, via: str, peer: str, address: str, timeout_s: float) -> None:
        request = pb.ProbeRequest(peer=peer, address=address, timeout_s=timeout_s)
        alive = False
        with suppress(TransportError, wire.WireError):
            raw = await self._transport.call(
                via, "Control/ProbeFor", request.SerializeToString(), 2 * timeout_s
            )
            alive = wire.parse(pb.ProbeReply, raw).alive
        self._step(ProbedFor(peer, alive))

    def _doubt(self, peer: str) -> None:
        self._step(Doubted(peer))

    def _address_of(self, peer: str) -> str | None:
        return self._known.address(peer)

    async def _tick_membership(self) -> None:
        self._step(Tick())

    async def _tick_rounds(self) -> None:
        self._reducer.tick()
        self._contributor.tick()

    async def _leave(self) -> None:
        """Tells every live peer; a short wait at most, for gossip will do the rest."""
        self._step(Leaving())
        targets = [c.address for c in self.cards if c.live and c.peer != self._node.peer]
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await asyncio.gather(*(self._exchange_gossip(a, 1.0) for a in targets))

    # ------------------------------------------------------------------------------ joining in

    async def _start(self) -> None:
        """Waits for enough peers, takes over what the swarm has, lets the train thread begin."""
        deadline = self._clock() + self._node.wait_s
        problems: dict[str, str] = {}
        hint_at = 0.0
        while True:
            if self._clock() >= hint_at:
                hint_at = self._clock() + _HINT_S
                await self._try_hints(problems)
            if self._status.published is not None:
                if await self._take_over():
                    break
                ready = self._joinable()
                if len(ready) >= self._node.min_peers and self._node.peer in ready:
                    self._mailbox.answer(Started(ready))
                    break
            if self._clock() > deadline:
                have = ", ".join(c.peer for c in self.cards if c.live)
                tried = "; ".join(problems.values()) or "nobody else to ask"
                raise PeersUnreachable(
                    f"{len(self._joinable())} of {self._node.min_peers} peers after "
                    f"{self._node.wait_s:g} s ({have}); tried: {tried}; "
                    "start the others, or lower --min-peers"
                )
            await asyncio.sleep(0.05)
        await self._every(_REPAIR_S, self._repair)

    def _joinable(self) -> tuple[str, ...]:
        return tuple(sorted(View({c.peer: c for c in self.cards}).joinable()))

    async def _try_hints(self, problems: dict[str, str]) -> None:
        known = {card.address for card in self.cards if card.live}
        for address in self._node.joins:
            if address not in known:
                try:
                    self._step(Heard(await self._join(address)))
                    problems.pop(address, None)
                except TransportError as error:
                    problems[address] = str(error)

    async def _join(self, address: str) -> tuple[Card, ...]:
        """First contact. Raises ManifestRefused, Unreachable."""
        request = pb.JoinRequest(
            card=wire.card_to_message(self._known.me), manifest=self._packed_manifest
        )
        raw = await self._transport.call(
            address, "Control/Join", request.SerializeToString(), _CALL_S
        )
        reply = wire.parse(pb.JoinReply, raw)
        if reply.refusal:
            raise ManifestRefused(f"{address} refuses this run: {reply.refusal}")
        return wire.cards_from_messages(reply.members)

    async def _take_over(self) -> bool:
        """Joins a run under way: fetches what the most advanced peer has. False: there is none."""
        mine = self._known.me.digests
        running = [
            card
            for card in self.cards
            if card.peer != self._node.peer
            and card.health is Health.ALIVE
            and card.phase in (Phase.READY, Phase.TRAINING, Phase.DONE)
            and len(card.digests) == len(mine)
            and any(
                theirs.version and theirs.rank > my.rank
                for theirs, my in zip(card.digests, mine, strict=True)
            )
        ]
        under_way = any(
            card.phase in (Phase.TRAINING, Phase.DONE) and any(d.version for d in card.digests)
            for card in self.cards
        )
        donor = max(running, key=lambda card: [d.rank for d in card.digests], default=None)
        if donor is not None:
            fetched = await self._fetch(donor, range(len(mine)), "joining")
            if not fetched:
                return False
        if not under_way:
            return False
        self._mailbox.answer(Started(()))
        return True

    async def _repair(self) -> None:
        published = self._status.published
        if published is None or published.phase is not Phase.TRAINING:
            return
        mine = self._known.me.digests
        others = [card for card in self.cards if card.peer != self._node.peer]
        repair = choose_repair(mine, others, published.failed)
        if repair is not None:
            donor = next(card for card in others if card.peer == repair.peer)
            if await self._fetch(donor, repair.fragments, repair.reason):
                await asyncio.sleep(2 * _REPAIR_S)  # until the train thread has adopted it

    async def _fetch(self, donor: Card, fragments: Sequence[int], reason: str) -> bool:
        assert self._status.published is not None
        sizes = sizes_of(self._status.published.states)
        expected = {index: sizes[index] for index in fragments}
        try:
            step, states = await fetch_states(
                self._transport, donor.address, self.run_id, expected, self._offload
            )
        except (TransportError, wire.WireError) as error:
            self._log({"event": "warning", "text": f"fetching from {donor.peer}: {error}"})
            return False
        self._mailbox.answer(Adopt(donor.peer, step, states, reason))
        return True

    # ------------------------------------------------------------------------- the train thread

    async def _take_mail(self) -> None:
        while True:
            match await self._inbox.get():
                case Begin() as begin:
                    await self._contributor.begin(begin)
                case Published() as published:
                    self._take_published(published)
                case Progress(event):
                    if event["event"] == "progress":
                        self._status.last_progress = event
                    self._log(event)

    def _take_published(self, published: Published) -> None:
        before = self._status.published
        self._status.published = published
        digests = tuple(
            Digest(s.version, s.contributors, s.hash, s.next_round) for s in published.states
        )
        self._step(Updated(published.phase, published.step, digests))
        old = before.states if before else (None,) * len(published.states)
        for index, (was, state) in enumerate(zip(old, published.states, strict=True)):
            if was is None or (was.version, was.group) != (state.version, state.group):
                self._reducer.advanced(index, state.version, state.group)

    def _finished(self, result: RoundDone | RoundFailed) -> None:
        if isinstance(result, RoundDone):
            self._status.rounds_completed += 1
        else:
            self._status.rounds_failed += 1
        self._mailbox.answer(result)

    # ------------------------------------------------------------------------------ coordinator

    async def _keep_coordinator_told(self) -> None:
        """Introduces this peer now and then, and learns who else is there. It may come and go."""
        address = self._node.coordinator
        assert address is not None
        reachable = True
        for first in itertools.chain([True], itertools.repeat(False)):
            sending = self._events[:_MAX_EVENTS]
            request = pb.IntroduceRequest(
                card=wire.card_to_message(self._known.me),
                manifest=self._packed_manifest,
                events=[wire.pack_document(event) for event in sending],
            )
            try:
                raw = await self._transport.call(
                    address, "Coordinator/Introduce", request.SerializeToString(), _CALL_S
                )
                reply = wire.parse(pb.IntroduceReply, raw)
                if reply.refusal:
                    raise ManifestRefused(
                        f"coordinator {address} refuses this run: {reply.refusal}"
                    )
                self._step(Heard(wire.cards_from_messages(reply.members)))
                del self._events[: len(sending)]
                reachable = True
            except (TransportError, wire.WireError) as error:
                if reachable and not first:
                    self._log({"event": "warning", "text": f"coordinator: {error}; going on"})
                reachable = False
            started = self._status.published is not None
            await asyncio.sleep(_COORDINATOR_S if started and reachable else 0.25)

    # ---------------------------------------------------------------------------------- helpers

    def _log(self, event: dict[str, object]) -> None:
        """To the log, and to the coordinator if there is one."""
        self._log_event(event)
        if self._node.coordinator:
            if event["event"] == "progress" and self._events[-1:]:
                last = self._events[-1]
                if last["event"] == "progress":
                    self._events.pop()
            self._events.append(event)
            del self._events[: -16 * _MAX_EVENTS]

    async def _every(self, period_s: float, work: Callable[[], object]) -> None:
        while True:
            outcome = work()
            if asyncio.iscoroutine(outcome):
                await outcome
            await asyncio.sleep(period_s)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        if self._group is None or self._closing.is_set():
            work.close()
            return
        self._group.create_task(work)
