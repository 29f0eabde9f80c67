"""Coming into a swarm, and staying in step with it: first contact, take-over, anti-entropy."""

import asyncio
import math
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from algorithms.fragment_state import FragmentState
from algorithms.plan import Plan
from protos import murmuration_pb2 as pb
from protos.events import new_event
from protos.manifest import first_difference
from protos.text import shown
from worker import wire
from worker.catchup.repair import JumpLimit, choose_repair, step_of_the_others
from worker.catchup.start import TakeOver, choose_take_over, have_started, may_follow
from worker.catchup.state_transfer import confirm_states, fetch_states, sizes_of
from worker.config import Config
from worker.errors import ManifestRefused, PeersUnreachable
from worker.exchange.context import Offload
from worker.manifest import Manifest
from worker.membership import Digest, Health, Member, Phase
from worker.membership.io import GossipService
from worker.training.inbox import Adopt, AllStarted, Published, SkipAhead, Started, ToTrain
from worker.transport import Transport, TransportError
from worker.transport.grpc import GrpcTransport

_TRY_S = 3.0
_GLANCE_S = 2.0
_PAUSE_S = 0.25
_HINT_S = 0.5
_START_POLL_S = 0.05
_TOGETHER_S = 5.0
_REPAIR_S = 0.25
_SKIP_S = 1.0
_ASKED = 8  # peers that may confirm a state
_ASKING_S = 2.0
_ALONE_S, _ALONE_ROUNDS = 10.0, 3
_ASIDE_S = 5.0
_RETRY_S = 0.25
_MAX_WARNINGS = 32
_AHEAD_OF_GOSSIP = 256  # rounds between what a donor has announced and what it gives


@dataclass(frozen=True, kw_only=True)
class JoinConfig:
    """Args:
    joins: addresses to try, again and again until the run starts.
    min_peers: how many must be ready before the run starts, None to leave that to the others;
    wait_s: how long to wait for them.
    """

    joins: tuple[str, ...] = ()
    min_peers: int | None = 1
    wait_s: float = 120.0


class CatchUpHost(Protocol):
    """What this asks of the node that it runs in. `partners`: of this peer's rounds in pairs."""

    transport: Transport
    offload: Offload
    published: Published | None

    @property
    def partners(self) -> Container[str]: ...

    def clock(self) -> float: ...

    def post(self, message: ToTrain) -> None:
        """Sends a message to the train thread."""
        ...

    def give_up(self, fragment: int, reason: str) -> None:
        """Ends this peer's own round of a fragment, which the fetched state supersedes."""
        ...

    def log(self, event: dict[str, object]) -> None: ...


class Bootstrap:
    """Waits for enough peers, takes over what a run under way has, and repairs ever after.

    Args:
        plan: without an exchange there is nothing to take over or repair; in pairs it is only the
            position in the schedule, and in the end the one state where there is to be one.
    """

    def __init__(
        self, config: JoinConfig, plan: Plan, gossip: GossipService, host: CatchUpHost
    ) -> None:
        self._config, self._plan, self._gossip, self._host = config, plan, gossip, host
        self._exchanges, self._pairs = plan.exchange != "none", plan.exchange == "pairs"
        self._seen_at = math.inf  # when another was first seen to have started
        self._limit = JumpLimit(plan.inner_steps)
        self._told: set[str] = set()
        self._aside: dict[str, float] = {}  # whose states were not to be had, until when
        self._still_since = math.inf  # since when a state that nobody confirms was the only one
        self._still_at: dict[int, int] = {}

    async def run(self) -> None:
        """Until cancelled. Raises PeersUnreachable, ManifestRefused, NotDialled."""
        await self._start()
        while self._exchanges:
            await asyncio.sleep(_REPAIR_S)
            await self._repair()

    async def _start(self) -> None:
        host = self._host
        deadline = host.clock() + self._config.wait_s
        problems: dict[str, str] = {}
        hint_at = host.clock()
        while True:
            if host.clock() >= hint_at:
                hint_at = host.clock() + _HINT_S
                await self._try_hints(problems)
            if host.published is not None and not self._gossip.undialled:
                fetched, under_way = True, False
                if self._exchanges:
                    taken = self._take_over()
                    fetched, under_way = await self._fetched(taken), taken.under_way
                if fetched and under_way:
                    host.post(Started(()))
                    return
                if fetched and self._complete() and self._gossip.me.phase is Phase.READY:
                    await self._start_with(self._joinable())
                    return
            if host.clock() > deadline:
                raise PeersUnreachable(self._too_few(problems))
            await asyncio.sleep(_START_POLL_S)

    async def _start_with(self, group: tuple[str, ...]) -> None:
        """In pairs, where later nobody waits for the rest, all take the first step together: peers
        that have started know the others, so that all draw their first partners from the same."""
        host = self._host
        host.post(Started(group))
        if not self._pairs:
            return
        until = host.clock() + _TOGETHER_S
        while host.clock() < until and any(
            member.peer in group and member.live and member.phase is Phase.READY
            for member in self._gossip.others
        ):
            await asyncio.sleep(_START_POLL_S)
        host.post(AllStarted())

    def _complete(self) -> bool:
        """Whether enough are here, or this peer may follow others that have started."""
        arrived, min_peers = self._gossip.swarm.arrived(), self._config.min_peers
        if min_peers is not None and len(arrived) >= min_peers:
            return True
        # None of these is one to take over from: that comes first.
        if not (started := have_started(self._gossip.others)):
            return False
        self._seen_at = min(self._seen_at, self._host.clock())
        return may_follow(started, self._digests_at_start(), self._host.clock() - self._seen_at)

    async def _try_hints(self, problems: dict[str, str]) -> None:
        known = {member.address for member in self._gossip.members if member.live}
        for address in self._config.joins:
            if address not in known:
                problem = await self._gossip.contact(address)
                problems |= {address: problem} if problem else {}
                if not problem:
                    problems.pop(address, None)

    def _too_few(self, problems: dict[str, str]) -> str:
        have = ", ".join(member.peer for member in self._gossip.members if member.live)
        tried = "; ".join(problems.values()) or "everyone named answered"
        return (
            f"{len(self._gossip.swarm.arrived())} of {self._config.min_peers} peers after "
            f"{self._config.wait_s:g} s (here: {have}); tried: {tried}; "
            "start the others, or lower --min-peers"
        )

    def _take_over(self) -> TakeOver:
        gossip = self._gossip
        replicas = self._first_choices(gossip.replicas)
        return choose_take_over(gossip.me, replicas, self._digests_at_start(), self._plan)

    async def _fetched(self, take_over: TakeOver) -> bool:
        """Whether there is nothing to fetch before the start, or it is here."""
        fragments = range(len(self._gossip.me.digests))
        return take_over.donor is None or await self._fetch(take_over.donor, fragments, "joining")

    def _joinable(self) -> tuple[str, ...]:
        return tuple(sorted(self._gossip.view.joinable()))

    def _digests_at_start(self) -> tuple[Digest, ...]:
        """This peer's digests as they will be once it starts with all that may join."""
        published, group = self._host.published, self._joinable()
        assert published is not None, "nothing to compare with"
        return tuple(
            Digest(s.version, s.contributors, wire.state_hash(s.anchor, s.momentum, group))
            for s in published.states
        )

    async def _repair(self) -> None:
        host, published = self._host, self._host.published
        if published is None or published.phase not in (Phase.TRAINING, Phase.DONE):
            return
        others = self._possible(published)
        if self._pairs and published.phase is Phase.TRAINING:
            step = step_of_the_others(self._gossip.me.digests, others, host.partners)
            if step is not None and step > published.step:
                for index in range(len(published.states)):
                    host.give_up(index, "the others have gone on")
                host.post(SkipAhead(step))
                await asyncio.sleep(_SKIP_S)  # until that is known to the others
            return
        if self._pairs:  # without consensus all differ, and stay so
            agree = self._plan.consensus
            others = [member for member in others if agree and member.phase is Phase.DONE]
        others = [*self._first_choices(others)]
        repair = choose_repair(self._gossip.me.digests, others, published.failed)
        if repair is not None and await self._fetch(repair.donor, repair.fragments, repair.reason):
            await asyncio.sleep(_REPAIR_S)  # until the train thread has adopted it

    def _possible(self, published: Published) -> list[Member]:
        """The replicas, but those that say they are where nobody can be yet."""
        gossip, now = self._gossip, self._host.clock()
        self._limit.advance(published.step, published.step_s, now)
        found = []
        for member in gossip.replicas:
            if self._limit.possible(member, gossip.me.digests, published.step, now):
                found.append(member)
            else:
                far = max((digest.version for digest in member.digests), default=0)
                where = f"step {member.step} and version {far}"
                self._set_aside(member, f"nobody can be at {where} by now", _ASIDE_S)
        return found

    async def _fetch(self, donor: Member, fragments: Iterable[int], reason: str) -> bool:
        host, published = self._host, self._host.published
        assert published is not None, "nothing to compare with"
        sizes = sizes_of(published.states)
        expected = {index: sizes[index] for index in fragments}
        try:
            step, states = await fetch_states(
                host.transport, donor.address, self._gossip.run, expected, host.offload
            )
            self._check_announced(donor, step, states)
        except (TransportError, wire.WireError) as error:
            lasting = isinstance(error, wire.WireError)
            self._set_aside(donor, str(error), _ASIDE_S if lasting else _RETRY_S)
            return False
        confirmed = await self._confirmed(donor, states)
        if confirmed is None:
            self._set_aside(donor, "no other peer has its state", _ASIDE_S)
            return False
        for index, state in states.items():
            if state.version > published.states[index].version:
                host.give_up(index, f"over for the others: {reason}")
        self._still_at = {}
        host.post(Adopt(donor.peer, step, states, reason, confirmed))
        return True

    def _set_aside(self, donor: Member, reason: str, for_s: float) -> None:
        """Its state is not taken; others come first for a while."""
        self._aside[donor.peer] = self._host.clock() + for_s
        text = f"fetching from {donor.peer}: {shown(reason, 200)}"
        if text not in self._told and len(self._told) < _MAX_WARNINGS:
            self._told.add(text)
            self._host.log(new_event("warning", text=text))

    def _first_choices(self, members: Sequence[Member]) -> Sequence[Member]:
        """Those that are not set aside; all of them, where there is no other."""
        now = self._host.clock()
        return [m for m in members if now >= self._aside.get(m.peer, -math.inf)] or members

    def _check_announced(
        self, donor: Member, step: int, states: Mapping[int, FragmentState]
    ) -> None:
        """Raises WireError: this is not what the donor has announced, nor what can follow it."""
        heard = (m for m in self._gossip.members if m.peer == donor.peer and m.digests)
        newest = next(heard, donor)  # without digests it has just started again
        for index, state in states.items():
            said = donor.digests[index]
            if state.version < said.version or (
                state.version == said.version and state.hash != said.hash
            ):
                raise wire.WireError(
                    f"fragment {index} is another state than the announced version {said.version}"
                )
            if state.version > newest.digests[index].version + _AHEAD_OF_GOSSIP:
                raise wire.WireError(
                    f"fragment {index} is of version {state.version}, announced was {said.version}"
                )
        if problem := self._gossip.limits.progress_problem(0, step):
            raise wire.WireError(problem)

    async def _confirmed(
        self, donor: Member, states: Mapping[int, FragmentState]
    ) -> tuple[str, ...] | None:
        """The peers that hold these states too; empty where nobody else could; None where somebody
        could and does not. The donor's word is enough against this peer's own, as states of one
        version rank, or once this peer's rounds have stood still for longer than they take."""
        seconds = [
            member
            for member in self._gossip.replicas
            if member.health is Health.ALIVE
            and member.phase in (Phase.TRAINING, Phase.DONE)
            and member.peer != donor.peer
        ][:_ASKED]
        if not seconds or (self._pairs and donor.phase is not Phase.DONE):
            return ()  # in pairs all states differ
        answers = await self._ask(seconds, states)
        if holders := tuple(m.peer for m, held in zip(seconds, answers, strict=True) if held):
            return holders
        now, published = self._host.clock(), self._host.published
        assert published is not None, "there was something to compare with"
        mine = {index: published.states[index] for index in states}
        versions = {index: state.version for index, state in mine.items()}
        if versions != self._still_at:
            self._still_since, self._still_at = now, versions
        if now >= self._still_since + max(
            _ALONE_S, _ALONE_ROUNDS * self._plan.inner_steps * published.step_s
        ):
            return ()
        same = all(mine[index].version == state.version for index, state in states.items())
        if same and None not in answers and True not in await self._ask(seconds, mine):
            return ()
        return None

    async def _ask(
        self, seconds: Sequence[Member], states: Mapping[int, FragmentState]
    ) -> list[bool | None]:
        """What each says of the states. A peer that does not know them yet is asked again for a
        while, as long as nobody holds them."""
        until = self._host.clock() + _ASKING_S
        while True:
            answers = await asyncio.gather(*(self._confirms(member, states) for member in seconds))
            if True in answers or None not in answers or self._host.clock() >= until:
                return answers
            await asyncio.sleep(_REPAIR_S)

    async def _confirms(self, member: Member, states: Mapping[int, FragmentState]) -> bool | None:
        """None: it does not know, or does not say."""
        try:
            return await confirm_states(
                self._host.transport, member.address, self._gossip.run, states
            )
        except (TransportError, wire.WireError):
            return None


@dataclass(frozen=True)
class FirstAnswer:
    """What a peer or a coordinator says before this process knows anything of the run.

    Args:
        coordinated: whether it is a coordinator.
        seen_from: the host that it has seen this process at; empty where it does not say.
        time_ms: its wall clock, from 1970; 0 where it does not say.
    """

    manifest: Manifest
    coordinated: bool
    seen_from: str
    time_ms: int


def fetch_manifest(address: str, timeout_s: float, proxy: str | None = None) -> FirstAnswer:
    """Asks a peer or a coordinator what its run is.

    Raises:
        PeersUnreachable: no answer within `timeout_s`; says what was tried.
    """
    return asyncio.run(_fetch_manifest(GrpcTransport("127.0.0.1:0", proxy), address, timeout_s))


def check_run(addresses: Sequence[str], config: Config, proxy: str | None = None) -> str:
    """Asks those that answer at once whether they run what `config` says, before a model is built.

    Returns:
        The host that the first of `addresses` has seen this process at; empty where it has not.

    Raises:
        ManifestRefused: one runs something else; names the first difference.
    """
    answers = asyncio.run(_first_answers(addresses, proxy))
    mine = Manifest.of(config, ()).agreed
    for address, answer in answers.items():
        theirs = {**answer.manifest.agreed, "tensors": mine["tensors"]}  # known with the model
        if difference := first_difference(mine, theirs):
            raise ManifestRefused(
                f"{address} runs something else: {difference}; leave it out, or join another run"
            )
    first = answers.get(addresses[0]) if addresses else None
    return first.seen_from if first else ""


async def _first_answers(addresses: Sequence[str], proxy: str | None) -> dict[str, FirstAnswer]:
    """By address, of those that answer one call."""
    transport = GrpcTransport("127.0.0.1:0", proxy)

    async def ask(address: str) -> FirstAnswer | None:
        with suppress(TransportError, wire.WireError):
            return await _ask_run(transport, address, _GLANCE_S)
        return None

    try:
        answers = await asyncio.gather(*map(ask, addresses))
    finally:
        await transport.close()
    found = zip(addresses, answers, strict=True)
    return {address: answer for address, answer in found if answer is not None}


async def _ask_run(transport: Transport, address: str, timeout_s: float) -> FirstAnswer:
    """Raises TransportError, WireError."""
    request = pb.JoinRequest().SerializeToString()
    raw = await transport.call(address, "Control/Join", request, timeout_s)
    reply = wire.parse(pb.JoinReply, raw)
    manifest = Manifest.unpack(reply.manifest)
    return FirstAnswer(manifest, reply.coordinator, reply.seen_from, reply.time_ms)


async def _fetch_manifest(transport: Transport, address: str, timeout_s: float) -> FirstAnswer:
    deadline = time.monotonic() + timeout_s
    tries, problem = 0, ""
    try:
        while (left_s := deadline - time.monotonic()) > 0:
            tries += 1
            try:
                return await _ask_run(transport, address, min(_TRY_S, left_s))
            except (TransportError, wire.WireError) as error:
                problem = str(error)
            await asyncio.sleep(_PAUSE_S)
    finally:
        await transport.close()
    raise PeersUnreachable(
        f"no peer answers at {address}: {tries} tries in {timeout_s:.1f} s, the last: {problem}; "
        "check the address, that a worker runs there, and that its port is open"
    )
