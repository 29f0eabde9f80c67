"""Coming into a swarm, and staying in step with it: first contact, take-over, anti-entropy."""

import asyncio
import math
import time
from collections.abc import Callable, Container, Iterable, Sequence

from algorithms.plan import Plan
from protos import murmuration_pb2 as pb
from worker import wire
from worker.catchup.repair import choose_repair, step_of_the_others
from worker.catchup.state_transfer import fetch_states, sizes_of
from worker.errors import PeersUnreachable
from worker.exchange.context import Offload
from worker.manifest import Manifest
from worker.membership import Digest, Health, Member, Phase
from worker.membership.io import GossipService
from worker.training.inbox import Adopt, AllStarted, Mailbox, Published, SkipAhead, Started
from worker.transport import Transport, TransportError
from worker.transport.grpc import GrpcTransport

_TRY_S = 3.0
_PAUSE_S = 0.25
_HINT_S = 0.5
_START_POLL_S = 0.05
_ALONE_S = 2.0
_TOGETHER_S = 5.0
_REPAIR_S = 0.25
_SKIP_S = 1.0


class Bootstrap:
    """Waits for enough peers, takes over what a run under way has, and repairs ever after.

    Args:
        joins: addresses to try until the run starts.
        min_peers, wait_s: how many to wait for, and how long; None: until another has started.
        published: what the train thread has committed, None before it has anything.
        plan: without an exchange there is nothing to take over or repair; in pairs it is only the
            position in the schedule, and in the end the one state where there is to be one.
        give_up: ends this peer's own round of a fragment, which the fetched state supersedes.
        partners: in pairs, with whom this peer is to hold the rounds that it has come to.
    """

    def __init__(
        self,
        *,
        joins: tuple[str, ...],
        min_peers: int | None,
        wait_s: float,
        plan: Plan,
        run: int,
        gossip: GossipService,
        transport: Transport,
        mailbox: Mailbox,
        offload: Offload,
        published: Callable[[], Published | None],
        give_up: Callable[[int, str], None],
        partners: Callable[[], Container[str]],
        clock: Callable[[], float],
        log: Callable[[dict[str, object]], None],
    ) -> None:
        self._joins, self._min_peers, self._wait_s = joins, min_peers, wait_s
        self._plan, self._exchanges = plan, plan.exchange != "none"
        self._pairs = plan.exchange == "pairs"
        self._run, self._gossip, self._transport = run, gossip, transport
        self._mailbox, self._offload, self._published = mailbox, offload, published
        self._give_up, self._partners = give_up, partners
        self._clock, self._log = clock, log
        self._seen_at = math.inf  # when another was first seen to have started

    async def run(self) -> None:
        """Until cancelled. Raises PeersUnreachable, ManifestRefused."""
        await self._start()
        while self._exchanges:
            await asyncio.sleep(_REPAIR_S)
            await self._repair()

    async def _start(self) -> None:
        deadline = self._clock() + self._wait_s
        problems: dict[str, str] = {}
        hint_at = self._clock()
        while True:
            if self._clock() >= hint_at:
                hint_at = self._clock() + _HINT_S
                await self._try_hints(problems)
            if self._published() is not None:
                taken = await self._take_over() if self._exchanges else False
                if taken:
                    self._mailbox.answer(Started(()))
                    return
                if taken is False and self._complete() and self._gossip.me.phase is Phase.READY:
                    await self._start_with(tuple(sorted(self._gossip.view.joinable())))
                    return
            if self._clock() > deadline:
                raise PeersUnreachable(self._too_few(problems))
            await asyncio.sleep(_START_POLL_S)

    async def _start_with(self, group: tuple[str, ...]) -> None:
        """In pairs, where later nobody waits for the rest, all take the first step together: who
        has started knows the others, so that all draw their first partners from the same peers."""
        self._mailbox.answer(Started(group))
        if not self._pairs:
            return
        until = self._clock() + _TOGETHER_S
        while self._clock() < until and any(
            member.peer in group and member.live and member.phase is Phase.READY
            for member in self._gossip.others
        ):
            await asyncio.sleep(_START_POLL_S)
        self._mailbox.answer(AllStarted())

    def _complete(self) -> bool:
        """Whether enough are here, or another has started that knows the same peers; or that knows
        others, and it has been some time since."""
        arrived = self._gossip.swarm.arrived()
        if self._min_peers is not None and len(arrived) >= self._min_peers:
            return True
        # None of these is one to take over from: `_take_over` comes first. They may be done
        # already, and wait for this peer, which makes a stage anew.
        phases = (Phase.TRAINING, Phase.DONE)
        started = [
            member for member in self._gossip.others if member.live and member.phase in phases
        ]
        if not started:
            return False
        self._seen_at = min(self._seen_at, self._clock())
        as_started = self._digests_with(tuple(sorted(self._gossip.view.joinable())))
        known = any(member.digests == as_started for member in started)
        return known or self._clock() >= self._seen_at + _ALONE_S

    async def _try_hints(self, problems: dict[str, str]) -> None:
        known = {member.address for member in self._gossip.members if member.live}
        for address in self._joins:
            if address not in known:
                try:
                    await self._gossip.join(address)
                    problems.pop(address, None)
                except (TransportError, wire.WireError) as error:
                    problems[address] = str(error)

    def _too_few(self, problems: dict[str, str]) -> str:
        have = ", ".join(member.peer for member in self._gossip.members if member.live)
        tried = "; ".join(problems.values()) or "everyone named answered"
        return (
            f"{len(self._gossip.swarm.arrived())} of {self._min_peers} peers after "
            f"{self._wait_s:g} s (here: {have}); tried: {tried}; "
            "start the others, or lower --min-peers"
        )

    async def _take_over(self) -> bool | None:
        """Whether a run is under way that this peer is not laid out in, and its state was fetched;
        None when it could not be fetched this time.

        Peers that have started a moment ago with this one in their group have the state that this
        one will have: then there is nothing to take over. Of peers that are all about to start,
        after a restart of the whole swarm, the most advanced gives its state to the others.
        """
        mine, others = self._gossip.me.digests, self._gossip.replicas
        known = [
            member
            for member in others
            if member.health is Health.ALIVE
            and member.phase is not Phase.STARTING
            and len(member.digests) == len(mine)
        ]
        started = [member for member in known if member.phase is not Phase.READY]
        as_started = self._digests_with(tuple(sorted(self._gossip.view.joinable())))
        under_way = not self._stand(started) and all(c.digests != as_started for c in started)
        ahead = [
            member
            for member in known
            if any(
                theirs.version and theirs.rank > my.rank
                for theirs, my in zip(member.digests, mine, strict=True)
            )
        ]
        donors = ahead or (started if under_way else [])
        if donors:
            donor = max(donors, key=lambda member: [digest.rank for digest in member.digests])
            if not await self._fetch(donor, range(len(mine)), "joining"):
                return None
        return under_way

    def _stand(self, started: Sequence[Member]) -> bool:
        """Whether those who have started wait for the others before their first step: then they
        have what this peer has."""
        here = self._position(self._gossip.me)
        alike = all(self._position(member) == here for member in started)
        return not started or (self._pairs and alike)

    @staticmethod
    def _position(member: Member) -> tuple[int, ...]:
        return (member.step, *(digest.version for digest in member.digests))

    def _digests_with(self, group: tuple[str, ...]) -> tuple[Digest, ...]:
        """This peer's digests as they will be once it starts with that group."""
        published = self._published()
        assert published is not None, "nothing to compare with"
        return tuple(
            Digest(s.version, s.contributors, wire.state_hash(s.anchor, s.momentum, group))
            for s in published.states
        )

    async def _repair(self) -> None:
        published = self._published()
        if published is None or published.phase not in (Phase.TRAINING, Phase.DONE):
            return
        others = self._gossip.replicas
        if self._pairs and published.phase is Phase.TRAINING:
            step = step_of_the_others(self._gossip.me.digests, others, self._partners())
            if step is not None and step > published.step:
                for index in range(len(published.states)):
                    self._give_up(index, "the others have gone on")
                self._mailbox.answer(SkipAhead(step))
                await asyncio.sleep(_SKIP_S)  # until that is known to the others
            return
        if self._pairs:  # without consensus all differ, and stay so
            agree = self._plan.consensus
            others = [member for member in others if agree and member.phase is Phase.DONE]
        repair = choose_repair(self._gossip.me.digests, others, published.failed)
        if repair is not None:
            donor = next(member for member in others if member.peer == repair.peer)
            if await self._fetch(donor, repair.fragments, repair.reason):
                await asyncio.sleep(_REPAIR_S)  # until the train thread has adopted it

    async def _fetch(self, donor: Member, fragments: Iterable[int], reason: str) -> bool:
        published = self._published()
        assert published is not None, "nothing to compare with"
        sizes = sizes_of(published.states)
        expected = {index: sizes[index] for index in fragments}
        try:
            step, states = await fetch_states(
                self._transport, donor.address, self._run, expected, self._offload
            )
        except (TransportError, wire.WireError) as error:
            self._log({"event": "warning", "text": f"fetching from {donor.peer}: {error}"})
            return False
        for index, state in states.items():
            if state.version > published.states[index].version:
                self._give_up(index, f"over for the others: {reason}")
        self._mailbox.answer(Adopt(donor.peer, step, states, reason))
        return True


def fetch_manifest(
    address: str, timeout_s: float, proxy: str | None = None
) -> tuple[Manifest, bool]:
    """Asks a peer or a coordinator what its run is, before this process knows anything.

    Returns:
        (the manifest, whether a coordinator gave it).

    Raises:
        PeersUnreachable: no answer within `timeout_s`; says what was tried.
    """
    return asyncio.run(_fetch_manifest(GrpcTransport("127.0.0.1:0", proxy), address, timeout_s))


async def _fetch_manifest(
    transport: Transport, address: str, timeout_s: float
) -> tuple[Manifest, bool]:
    deadline = time.monotonic() + timeout_s
    request = pb.JoinRequest().SerializeToString()
    tries, problem = 0, ""
    try:
        while (left_s := deadline - time.monotonic()) > 0:
            tries += 1
            try:
                raw = await transport.call(address, "Control/Join", request, min(_TRY_S, left_s))
                reply = wire.parse(pb.JoinReply, raw)
                return Manifest.unpack(reply.manifest), reply.coordinator
            except (TransportError, wire.WireError) as error:
                problem = str(error)
            await asyncio.sleep(_PAUSE_S)
    finally:
        await transport.close()
    raise PeersUnreachable(
        f"no peer answers at {address}: {tries} tries in {timeout_s:.1f} s, the last: {problem}; "
        "check the address, that a worker runs there, and that its port is open"
    )
