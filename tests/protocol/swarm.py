"""A swarm of real nodes and real trainers in one process, on the virtual clock.

Each peer is a `murmuration.worker.node.node.Node` on a `MemoryTransport`, with its `Trainer` on a
thread that runs only while the loop waits for it, so that every run of a test is the same.
"""

import asyncio
import contextvars
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import torch

from murmuration.algorithms.fragments import Fragment
from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker.catchup.choices import all_agree
from murmuration.worker.identity.authority import Authority, Credentials
from murmuration.worker.identity.certificates import Identity, Role
from murmuration.worker.node.node import Environment, Node, NodeConfig
from murmuration.worker.relay.router_port import NoRouterPort, UpnpRouter
from murmuration.worker.simulation.virtual_loop import Stalled, VirtualLoop, context_of
from murmuration.worker.status.document import LagMonitor
from murmuration.worker.training.loop import Trainer
from murmuration.worker.training.mailbox import Stop
from murmuration.worker.transport import Caller
from murmuration.worker.wire import tensor_hash
from tests.protocol.problem import Problem, Synthetic
from tests.protocol.train_side import TrainSide
from tests.support.early_starts import AnchorPrefetch
from tests.support.memory_transport import MemoryNetwork, MemoryTransport, Tap

_APART = 0.3  # of each peer's point from the common one, in units of that one's distance

T = TypeVar("T")

SETTLE_S = 30.0

Event = dict[str, object]


async def inline(work: Callable[[], T], /) -> T:
    """An `Offload` without threads."""
    return work()


@dataclass(frozen=True)
class Held:
    """The part that a peer trains, its fragments, and which stage of the model it is."""

    replica: Any
    fragments: Sequence[Fragment]
    stage: int = 0
    activation_shape: tuple[int, int, int] | None = None


class Events(list[Event]):
    """All of a peer's, and those of each kind: conditions ask for them at each look."""

    def __init__(self) -> None:
        super().__init__()
        self.of_kind: dict[object, list[Event]] = defaultdict(list)

    def append(self, event: Event) -> None:
        super().append(event)
        self.of_kind[event["event"]].append(event)


@dataclass
class Peer:
    """One worker of the swarm."""

    name: str
    address: str
    transport: MemoryTransport
    node: Node
    train: TrainSide
    trainer: Trainer
    replica: Any
    events: Events
    task: asyncio.Task[None] | None = None
    killed: bool = False

    @property
    def done(self) -> bool:
        """Trained to the end of the schedule, and settled."""
        return self.train.ended and self.train.error is None

    @property
    def versions(self) -> tuple[int, ...]:
        return tuple(state.version for state in self.trainer.states)

    @property
    def outer_hash(self) -> str:
        states = self.trainer.states
        return tensor_hash([*(s.anchor for s in states), *(s.momentum for s in states)])

    def of_kind(self, kind: str) -> list[Event]:
        """The peer's events of one kind."""
        return [*self.events.of_kind.get(kind, ())]

    @property
    def warnings(self) -> list[str]:
        return [str(event["text"]) for event in self.of_kind("warning")]

    def warned(self, of: str) -> bool:
        return any(of in text for text in self.warnings)

    @property
    def members(self) -> list[dict[str, object]]:
        """Whom the peer knows, as `murmur status` shows them."""
        members = self.node.status()["members"]
        assert isinstance(members, list)
        return members

    @property
    def payload_received_bytes(self) -> int:
        return self.node.context.counts.payload_received_bytes

    @property
    def payload_sent_bytes(self) -> int:
        return self.node.context.counts.payload_sent_bytes

    @property
    def refused(self) -> dict[str, int]:
        return self.node.context.counts.refused


class NoRouter(UpnpRouter):
    """Opens no port."""

    def __init__(self) -> None:
        self.offload = inline

    def open(self, bound: str, before: str) -> str:
        raise NoRouterPort(f"none for {bound}")

    def close(self, address: str) -> None:
        raise AssertionError(address)


@dataclass(frozen=True)
class Disk(Credentials):
    """The store of a peer for its next life, in memory. Args: store: by peer."""

    store: dict[str, list[pb.Revocation]] = field(default_factory=dict)
    peer: str = ""

    def keep_revoked(self, entries: Sequence[pb.Revocation]) -> None:
        self.store[self.peer] = list(entries)

    def revoked(self) -> list[pb.Revocation]:
        return self.store.get(self.peer, [])


class Swarm:
    """Peers of one problem. Use it as `async with Swarm(problem, "abc") as swarm`."""

    def __init__(
        self,
        problem: Problem,
        names: Iterable[str] = (),
        *,
        at: int = 0,
        delay_s: float = 0.01,
        authority: Authority | None = None,
    ) -> None:
        """Args:
        names: of peers that are started at once; others may be started later.
        at: the version that the first of them has when the swarm is given.
        authority: certifies the peers, which sign what they say of themselves then."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.problem, self.loop = problem, loop
        self.authority: Any = authority
        self._names, self._at = names, at
        self._identities: dict[str, Identity] = {}
        self.kept_revoked: dict[str, list[pb.Revocation]] = {}  # by peer, on its disk
        self.network = MemoryNetwork(delay_s)
        self.router: UpnpRouter = NoRouter()
        self.peers: dict[str, Peer] = {}
        self.starts_by_clock = False
        self.tap: Tap | None = None
        self.lags_s: dict[frozenset[str], float] = {}  # of each message of a stream, by its ends
        self.links_mbps: dict[str, float] = {}  # of peers whose streams share a slow link
        self._free_at: dict[tuple[str, bool], float] = {}  # a slow link, up or down, in s
        self._closing: asyncio.Task[None] | None = None

    def __getitem__(self, name: str) -> Peer:
        return self.peers[name]

    async def __aenter__(self) -> Self:
        try:
            await self.start(*self._names)
            if self._at:
                first = next(iter(self.peers.values()))
                await self.until(lambda: first.versions >= (self._at,), 120)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self.tap = None
        for peer in self.peers.values():
            peer.train.unwind()
            peer.node.close()
            self.loop.thaw(peer.address)
        await asyncio.gather(*(peer.task for peer in self.peers.values() if peer.task is not None))

    @property
    def alive(self) -> list[Peer]:
        return [peer for peer in self.peers.values() if not peer.killed]

    async def start(self, *names: str, min_peers: int | None = None) -> None:
        """Starts peers that know each other's addresses, and the first of those there already."""
        contacts = (*list(self.peers)[:1], *names)
        for name in names:
            await self.join(
                name,
                via=[other for other in contacts if other != name],
                min_peers=len(names) if min_peers is None else min_peers,
            )

    async def join(
        self,
        name: str,
        via: Iterable[str],
        min_peers: int | None = 1,
        problem: Problem | None = None,
        address: str = "",
        advertise: str | None = None,
        relayed: bool = True,
        wait_s: float = 60.0,
        before: Peer | None = None,
    ) -> Peer:
        """Starts one peer.

        Args:
            via: addresses to try; a peer's is its name unless `address` says otherwise.
            problem: when it is to run something else than the others.
            advertise: where the others are told to reach it.
            relayed: whether it may be reached through relays.
            min_peers, wait_s: as `NodeConfig` has them.
            before: an earlier life of the peer, from whose states it goes on."""
        problem, address = problem or self.problem, address or name
        context = context_of(address)
        transport = MemoryTransport(self.network, address, context, lambda: self.tap, self._lag_s)
        if self.authority is not None:
            transport.caller = Caller(address, Role.PEER, name)
        train = TrainSide(self.loop, context)
        held = self.part(problem, name, train)
        events = Events()
        node = Node(
            node=NodeConfig(
                peer=name,
                advertise=advertise,
                joins=tuple(via),
                min_peers=min_peers,
                wait_s=wait_s,
                stage=held.stage,
                activation_shape=held.activation_shape,
                relayed=relayed,
                start_ms=None if self.starts_by_clock else 1 + len(self.peers),
            ),
            config=problem.config,
            manifest=problem.manifest,
            fragments=held.fragments,
            transport=transport,
            mailbox=train,
            environment=Environment(
                offload=inline,
                log=events.append,
                clock=self.loop.time,
                credentials=Disk(self.identity(name), store=self.kept_revoked, peer=name),
                rng=random.Random(f"{problem.seed} {name}"),
                router=self.router,
            ),
        )
        node.lag = Punctual(self.loop.time)
        trainer = Trainer(
            replica=held.replica,
            fragments=held.fragments,
            plan=problem.plan,
            steps=problem.steps,
            mailbox=train,
            between_steps=lambda _: None,
            clock=self.loop.time,
        )
        for each in trainer.fragments if before else ():
            each.state = before.trainer.states[each.fragment.index]
        peer = Peer(name, address, transport, node, train, trainer, held.replica, events)
        self.peers[name] = peer

        def work() -> None:
            trainer.run()
            if trainer.stopped is None:
                trainer.await_others(
                    lambda: all_agree(node.gossip.me, node.gossip.others, problem.plan), SETTLE_S
                )
            elif trainer.stopped.error is None:
                trainer.hand_in(SETTLE_S)

        await node.listen()
        train.start(work, node.deliver)
        peer.task = self.loop.create_task(self._run(peer), context=context.copy())
        return peer

    def identity(self, name: str) -> Identity | None:
        """The peer's, the same after a restart; None where there are no certificates."""
        if self.authority is not None and name not in self._identities:
            self._identities[name] = self.authority.new_identity(Role.PEER, name)
        return self._identities.get(name)

    def part(self, problem: Problem, name: str, train: TrainSide) -> Held:
        """The part of the model that a peer is to hold."""
        return Held(Synthetic(problem, name, train.computes), problem.fragments)

    async def _run(self, peer: Peer) -> None:
        try:
            await peer.node.run()
        except Exception as error:
            cause: BaseException = error
            while isinstance(cause, BaseExceptionGroup):
                cause = cause.exceptions[0]
            peer.train.answer(Stop(str(cause), cause))

    # --------------------------------------------------------------------------------- faults

    def kill(self, name: str) -> None:
        """As SIGKILL: nothing of the peer runs any more, and its connections break."""
        peer = self.peers[name]
        peer.killed = True
        self.loop.freeze(peer.address)
        self._closing = self.loop.create_task(peer.transport.close(), context=contextvars.Context())

    async def restart(self, name: str, via: Iterable[str], **given: Any) -> Peer:
        """A killed peer begins a new life, at another address; from nothing, unless `join` is given
        an earlier one."""
        gone = self.peers.pop(name)
        assert gone.killed
        self.peers[f"{gone.address}, killed"] = gone
        return await self.join(name, via, address=f"{gone.address}'", **given)

    async def leave(self, name: str) -> None:
        """The peer ends in good order, as after SIGTERM, wherever it is."""
        peer = self.peers[name]
        assert peer.task is not None
        peer.train.answer(Stop("SIGTERM"))
        await self.until(lambda: peer.train.ended, SETTLE_S)
        peer.killed = True  # it is gone, in good order
        peer.node.close()
        await peer.task

    def freeze(self, name: str) -> None:
        self.loop.freeze(self.peers[name].address)

    def thaw(self, name: str) -> None:
        self.loop.thaw(self.peers[name].address)

    def cut(self, some: Iterable[str], others: Iterable[str]) -> None:
        """Breaks every link between the two sides."""
        for a, b in _pairs(some, others):
            self.network.cut(a, b)

    def _lag_s(self, source: str, target: str, size_bytes: int) -> float:
        """Until a message is through, and those that came to a slow link before it."""
        now = free_at = self.loop.time()
        for link in ((source, True), (target, False)):
            if rate_mbps := self.links_mbps.get(link[0]):
                free_at = max(free_at, self._free_at.get(link, 0.0)) + size_bytes * 8e-6 / rate_mbps
                self._free_at[link] = free_at
        return self.lags_s.get(frozenset((source, target)), 0.0) + free_at - now

    def heal(self, some: Iterable[str], others: Iterable[str]) -> None:
        for a, b in _pairs(some, others):
            self.network.heal(a, b)

    # -------------------------------------------------------------------------------- waiting

    async def sleep(self, seconds: float) -> None:
        """On the virtual clock."""
        await asyncio.sleep(seconds)

    async def until(self, what: Callable[[], bool], limit_s: float) -> None:
        """Waits on the virtual clock. Raises Stalled with what everyone is at."""
        deadline = self.loop.time() + limit_s
        while not what():
            for peer in self.alive:
                if peer.train.error is not None:
                    raise peer.train.error
            if self.loop.time() > deadline:
                raise Stalled("\n".join(self._outline()))
            await asyncio.sleep(0.02)

    async def finished(self, limit_s: float = 300.0) -> None:
        """Until every peer that lives has trained to the end, and has settled."""
        await self.until(lambda: all(peer.done for peer in self.alive), limit_s)

    async def ends_equal(
        self, limit_s: float = 300.0, *, versions: Sequence[int] | None = None
    ) -> None:
        """Until then; all that live must hold the same, as `assert_equal` says."""
        await self.finished(limit_s)
        self.assert_equal(versions=versions)

    async def ends_at_reference(self) -> None:
        """Until then; all must hold what the reference computes."""
        await self.finished()
        self.assert_reference()

    def _outline(self) -> Iterator[str]:
        yield f"not in time, at {self.loop.time():.2f} s:"
        for peer in self.peers.values():
            failed = [(e["round"], e["reason"]) for e in peer.of_kind("round_failed")]
            health = {member["peer"]: member["health"] for member in peer.members}
            yield (
                f"{peer.name}: step {peer.trainer.step}, versions {peer.versions}, "
                f"killed {peer.killed}, sees {health}, failed {failed[-3:]}"
            )

    # ------------------------------------------------------------------------------- outcomes

    def agrees(self, *names: str) -> bool:
        """Says if these, or all that live, hold the same anchors and momenta at one version."""
        peers = [self[name] for name in names] or self.alive
        return len({(peer.versions, peer.outer_hash) for peer in peers}) == 1

    def assert_equal(self, *, versions: Sequence[int] | None = None) -> None:
        """All that live hold the same anchors and momenta, at the version expected."""
        found = {peer.name: (peer.versions, peer.outer_hash) for peer in self.alive}
        assert len(set(found.values())) == 1, found
        if versions is not None:
            assert self.alive[0].versions == tuple(versions), found

    def assert_reference(self) -> None:
        """All peers hold, bit for bit, what the reference computes."""
        taken = AnchorPrefetch({peer.name: peer.of_kind("early_start") for peer in self.alive})
        expected = self.problem.reference(sorted(self.peers), taken)
        for peer in self.alive:
            for state, outer in zip(peer.trainer.states, expected[peer.name], strict=True):
                assert torch.equal(state.anchor, outer.anchor), peer.name
                if self.problem.plan.payload == "gradient":
                    assert (state.momentum.numel(), outer.momentum.count_nonzero()) == (0, 0)
                else:
                    assert torch.equal(state.momentum, outer.momentum), peer.name


class Punctual(LagMonitor):
    """The virtual clock is never late: saves a hundred wake-ups a second."""

    async def run(self) -> None:
        await asyncio.Event().wait()


def _pairs(some: Iterable[str], others: Iterable[str]) -> list[tuple[str, str]]:
    return [(a, b) for a in some for b in others]


class NearSwarm(Swarm):
    """A swarm whose peers learn nearly the same, as on samples of one distribution."""

    def part(self, problem: Problem, name: str, train: TrainSide) -> Held:
        held = super().part(problem, name, train)
        common = torch.Generator().manual_seed(problem.seed)
        for target in held.replica._targets.values():
            target.mul_(_APART).add_(torch.randn(target.shape, generator=common))
        return held
