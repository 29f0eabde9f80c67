"""Coming into a swarm, and staying in step with it: first contact, take-over, anti-entropy."""

import asyncio
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING

from murmuration.algorithms.plan import Plan
from murmuration.algorithms.robust import Doubts
from murmuration.protos import murmuration_pb2 as pb
from murmuration.protos.addresses import public_address
from murmuration.protos.events import Warnings, new_event
from murmuration.protos.exit_codes import MurmurError
from murmuration.worker import wire
from murmuration.worker.background import cancel
from murmuration.worker.catchup import choices
from murmuration.worker.catchup.donors import Donors, headers_at
from murmuration.worker.catchup.held_states import Received
from murmuration.worker.errors import ManifestRefused, NotDialled, PeersUnreachable
from murmuration.worker.membership import Digest, Health, Member, Phase
from murmuration.worker.membership.first_contact import FirstContact
from murmuration.worker.membership.gossip import GossipService
from murmuration.worker.training.mailbox import AllStarted, Published, SkipAhead, Started

if TYPE_CHECKING:
    from murmuration.worker.node.node import Node, NodeConfig

_HINT_S = 0.5
_TELL_S = 2.0  # then it is said for whom the start waits
_TELL_AGAIN_S = 30.0
DESERTED_S = 20.0  # without anybody that has begun the run, or would begin it
_START_POLL_S = 0.05
_TOGETHER_S = 5.0
_REPAIR_S = 0.25
_SKIP_S = 1.0
_ALONE_S = 2.0  # after which this peer follows others that have started without it
_LOOK_S, _ASKED = 1.0, 16  # how often peers are asked for their reductions, and how many of them
_BACK = 4  # rounds up to the one after which states are seen to differ


class Bootstrap:
    """Waits for enough peers, takes over what a run under way has, and repairs ever after: in pairs
    the position in the schedule, and at the end the one state if there is to be one."""

    def __init__(
        self, config: "NodeConfig", plan: Plan, first_contact: FirstContact, node: "Node"
    ) -> None:
        self._first_contact, gossip = first_contact, first_contact.gossip
        self._config, self._plan, self._gossip, self._node = config, plan, gossip, node
        self._exchanges, self._pairs = plan.exchange != "none", plan.exchange == "pairs"
        self._seen_at = math.inf  # when another was first seen to have started
        self._warnings = Warnings(node.log)
        self._problems: dict[str, str | None] = {}  # by address tried: why it does not answer
        self._deserted_since = math.inf
        # Of what is published, and a group: the digests with that group.
        self._as_started: tuple[object, tuple[str, ...], tuple[Digest, ...]] = None, (), ()
        self._donors, self._splits = Donors(plan, gossip, node), Splits(gossip, node)

    async def run(self) -> None:
        """Until cancelled. Raises PeersUnreachable, ManifestRefused, NotDialled."""
        addresses = dict.fromkeys((*self._config.joins, *self._config.remembered))
        tries = {each: asyncio.create_task(self._try(each)) for each in addresses}
        try:
            await self._start(tries)
        finally:
            await cancel(tries.values())
        while self._exchanges:
            await asyncio.sleep(_REPAIR_S)
            await self._repair()

    async def _start(self, tries: Mapping[str, asyncio.Task[MurmurError]]) -> None:
        """Args: tries: to reach others, by address; nobody begins before each has had its turn."""
        node = self._node
        deadline = node.clock() + self._config.wait_s
        tell_at, again_at = node.clock() + _TELL_S, 0.0
        told: frozenset[str] | None = None
        while True:
            tried = self._problems.keys() >= tries.keys()
            refusals = [each.result() for each in tries.values() if each.done()]
            let_in = sum(problem is None for problem in self._problems.values())
            if tried and len(refusals) > let_in:  # else one of several may lie
                raise refusals[0]
            for each in refusals if tried else ():
                self._warnings.add(f"{each}; going on without it")
            if tried and node.published is not None and not self._first_contact.undialled:
                fetched, under_way = True, False
                if self._exchanges:
                    as_started = await self._digests_at_start()
                    me = self._gossip.me
                    known = as_started, self._plan
                    under_way, donor = choose_take_over(me, self._gossip.replicas, *known)
                    first = self._donors.first_choices(self._gossip.replicas)
                    also, other = choose_take_over(me, first, *known)
                    donor = (other if also == under_way else None) or donor
                    every = range(len(me.digests))
                    fetched = donor is None or await self._donors.fetch(donor, every, "joining")
                    begins = not (
                        under_way or self._config.joins or any(d.version for d in me.digests)
                    )
                    if donor is not None and fetched and begins:
                        text = f"the first values of {donor.peer} count, and not those here: load "
                        text += "the same on every peer, or begin alone here (--min-peers 1)"
                        node.log(new_event("warning", text=text))
                lasting = node.clock() - self._donors.apart_since >= DESERTED_S and not fetched
                if lasting and self._holds_state and have_started(self._gossip.replicas):
                    text = "this peer goes on from its own state: those of the others are too far"
                    node.log(new_event("warning", text=text + " from it and from each other"))
                    fetched = under_way = True  # though some of them be where this peer is
                if fetched and under_way:
                    node.post(Started(()))
                    return
                if fetched and await self._complete() and self._gossip.me.phase is Phase.READY:
                    await self._start_with(tuple(sorted(self._gossip.view.joinable())))
                    return
            now = node.clock()
            waits_on = self._config.min_peers is None or self._config.wait_s == math.inf
            if waits_on and self._is_deserted(now) and not self._holds_state:
                raise PeersUnreachable(self._left_behind())
            if now > deadline:
                raise PeersUnreachable(self._too_few())
            arrived, wanted = self._gossip.swarm.arrived(), self._config.min_peers
            waits = self._gossip.me.live and (wanted is None or len(arrived) < wanted)
            if waits and now >= tell_at and (arrived != told or now >= again_at):
                node.log(new_event("awaiting", here=sorted(arrived), wanted=wanted))
                told, again_at = arrived, now + _TELL_AGAIN_S
            await asyncio.sleep(_START_POLL_S)

    async def _start_with(self, group: tuple[str, ...]) -> None:
        """In pairs all take the first step together, and draw partners from the same peers."""
        node = self._node
        node.post(Started(group))
        if not self._pairs:
            return
        until = node.clock() + _TOGETHER_S
        while node.clock() < until and any(
            member.peer in group and member.live and member.phase is Phase.READY
            for member in self._gossip.others
        ):
            await asyncio.sleep(_START_POLL_S)
        node.post(AllStarted())

    async def _complete(self) -> bool:
        """Tells whether this peer may start: with enough, after others, or without them."""
        arrived, min_peers = self._gossip.swarm.arrived(), self._config.min_peers
        if min_peers is not None and len(arrived) >= min_peers:
            return True
        # None of these is one to take over from: that comes first.
        now = self._node.clock()
        if not (started := have_started(self._gossip.others)):
            others = self._gossip.others  # they may be gone by now
            begun = any(member.phase in (Phase.TRAINING, Phase.DONE) for member in others)
            return (min_peers is None or begun) and self._holds_state and self._is_deserted(now)
        self._seen_at = min(self._seen_at, now)
        together = await self._digests_at_start() in {member.digests for member in started}
        return together or now - self._seen_at >= _ALONE_S

    @property
    def _holds_state(self) -> bool:
        """Says whether this peer has the whole model as rounds have made it: it can go on alone."""
        whole = self._gossip.limits.stages == 1
        return whole and any(digest.version for digest in self._gossip.me.digests)

    def _is_deserted(self, now: float) -> bool:
        """Says whether nobody has been here for a while that has begun the run, or would begin."""
        live = {member.address for member in self._gossip.others if member.live}
        hoped = any(each in live or not self._problems.get(each) for each in self._config.joins)
        hoped = hoped or self._first_contact.introduced
        waits = hoped or have_started(self._gossip.others)
        self._deserted_since = math.inf if waits else min(self._deserted_since, now)
        return now - self._deserted_since >= min(DESERTED_S, self._config.wait_s)

    async def _try(self, address: str) -> MurmurError:
        """Again and again, for itself: an address that nothing comes from holds up nothing else.
        Returns the refusal of one that the user has named."""
        while True:
            again_at, problem = self._node.clock() + _HINT_S, None
            if all(public_address(m.address) != address for m in self._gossip.members if m.live):
                try:
                    problem = await self._first_contact.contact(address)
                except (ManifestRefused, NotDialled) as error:
                    problem = str(error)
                    if address in self._config.joins:
                        self._problems[address] = problem
                        return error
            self._problems[address] = problem
            await asyncio.sleep(again_at - self._node.clock())

    def _too_few(self) -> str:
        have = ", ".join(member.peer for member in self._gossip.members if member.live)
        answers = [why or f"{address} answered" for address, why in self._problems.items()]
        tried = "; ".join(answers) or "nobody, as no --join names any"
        wanted = self._config.min_peers
        arrived = f"{len(self._gossip.swarm.arrived())} of {wanted} peers" if wanted else "no start"
        return (
            f"{arrived} after {self._config.wait_s:g} s (here: {have}); tried: {tried}; "
            "start the others, lower --min-peers, or wait longer with --wait-s"
        )

    def _left_behind(self) -> str:
        ends = {Health.LEFT: "has left", Health.DEAD: "does not answer any more"}
        gone = [f"{m.peer} {ends[m.health]}" for m in self._gossip.others if m.health in ends]
        said = "; ".join([*gone, *filter(None, self._problems.values())]) or "nobody answers"
        return (
            f"there is no run to join any more: {said}; this peer has not got its state; start one "
            "of them again, or begin another by `murmur up`"
        )

    async def _digests_at_start(self) -> tuple[Digest, ...]:
        """This peer's digests as they will be once it starts with all that may join."""
        published, group = self._node.published, tuple(sorted(self._gossip.view.joinable()))
        assert published is not None, "nothing to compare with"
        if self._as_started[0] is not published or self._as_started[1] != group:
            found = await self._node.offload(
                lambda: tuple(
                    Digest(s.version, s.contributors, wire.state_hash(s.anchor, s.momentum, group))
                    for s in published.states
                )
            )
            self._as_started = published, group, found
        return self._as_started[2]

    async def _repair(self) -> None:
        node, published = self._node, self._node.published
        if published is None or published.phase in (Phase.STARTING, Phase.READY):
            return
        others = self._possible(published)
        if self._pairs and published.phase is Phase.TRAINING:
            step = choices.step_of_the_others(self._gossip.me.digests, others, node.partners)
            if step is not None and step > published.step:
                for index in range(len(published.states)):
                    node.give_up(index, "the others have gone on")
                node.post(SkipAhead(step))
                await asyncio.sleep(_SKIP_S)  # until that is known to the others
            return
        if self._pairs:  # without consensus all differ, and stay so
            agree = self._plan.consensus
            others = [member for member in others if agree and member.phase is Phase.DONE]
        others, mine = [*self._donors.first_choices(others)], self._gossip.me.digests
        back: choices.Repair | None = None
        if not self._pairs:
            voters = self._donors.voters().others
            await self._splits.look(voters)
            ended = {published.phase, *(member.phase for member in voters)} == {Phase.DONE}
            back = choices.choose_return(mine, voters, node.held.hash_of, ended=ended)
        repair = back or choices.choose_repair(self._gossip.me.peer, mine, others, published.failed)
        if repair is not None:
            chosen = repair.donor, repair.fragments, repair.reason
            await self._donors.fetch(*chosen, goes_back=back is not None)

    def _possible(self, published: Published) -> list[Member]:
        """The replicas, but those that say they are where nobody can be yet."""
        gossip, now = self._gossip, self._node.clock()
        gossip.limits.takes(published.step, published.step_s, now)
        found = []
        for member in gossip.replicas:
            if published.phase is Phase.LEAVING and choices.at_end(member, gossip.limits.steps):
                continue  # this peer comes to that mean by itself
            if gossip.limits.can_be_at(member, gossip.me.digests, now):
                found.append(member)
            else:
                far = max((digest.version for digest in member.digests), default=0)
                where = f"step {member.step} and version {far}"
                self._donors.set_aside(member, f"nobody can be at {where} by now")
        return found


def choose_take_over(
    me: Member, replicas: Iterable[Member], as_started: tuple[Digest, ...], plan: Plan
) -> tuple[bool, Member | None]:
    """Decides before the start: (whether a run is under way, from which replica to fetch state).

    Peers that have just started with this one in their group have the state that it will have
    (`as_started`): nothing is to be taken over. Of peers that are all about to start, after a
    restart of the swarm, the most advanced gives its state to the others."""
    alive = [m for m in replicas if m.health is Health.ALIVE and m.phase is not Phase.STARTING]
    known = [member for member in alive if len(member.digests) == len(me.digests)]
    started = [member for member in known if member.phase is not Phase.READY]
    # In pairs, peers that have started wait for the others before their first step: until then they
    # have what this peer has.
    positions = {(m.step, *(each.version for each in m.digests)) for m in (me, *started)}
    wait = plan.exchange == "pairs" and len(positions) == 1
    under_way = bool(started) and not wait and all(m.digests != as_started for m in started)
    rank = choices.ranking((member.peer, member.digests) for member in (me, *known))
    ahead = [
        member
        for member in known
        if any(
            theirs.version and rank(index, theirs) > rank(index, mine)
            for index, (theirs, mine) in enumerate(zip(member.digests, me.digests, strict=True))
        )
    ]
    donors = ahead or (started if under_way else [])
    if not donors and not any(digest.version for digest in me.digests):
        # All are about to begin: where their models were drawn apart, that of most has it, of
        # several the first by name.
        ready = [me, *(member for member in known if member.phase is Phase.READY)]
        held = Counter(member.digests for member in ready)
        first = min(ready, key=lambda member: (-held[member.digests], member.peer))
        donors = [first] if first.digests != me.digests else []
    donor = max(donors, key=lambda m: [*map(rank, count(), m.digests)], default=None)
    return under_way, donor


def have_started(others: Iterable[Member]) -> list[Member]:
    """The peers that train, or are done and wait for this peer, whose stage is made again."""
    return [m for m in others if m.live and m.phase in (Phase.TRAINING, Phase.DONE)]


class Splits:
    """Notices, where states part, reducers that give each peer other bytes. I/O thread only.

    Peers with equal states that differ a version later compare what led there (docs/adr/0035)."""

    def __init__(self, gossip: GossipService, node: "Node") -> None:
        self._gossip, self._node = gossip, node
        self._warnings = Warnings(node.log)
        self._named: set[str] = set()
        self._doubts, self._next_at = Doubts(), 0.0

    async def look(self, voters: Sequence[Member]) -> None:
        """Compares where a voter's state is seen to differ at a version that this peer has had."""
        node, now = self._node, self._node.clock()
        apart = {
            (index, digest.version)
            for member in voters
            for index, digest in enumerate(member.digests)
            if node.held.hash_of(index, digest.version) not in (0, digest.hash)
        }
        if not apart or now < self._next_at:
            return
        self._next_at = now + _LOOK_S
        index, version = max(apart)
        wanted = [
            (at, mine)
            for at in range(version, max(0, version - _BACK), -1)
            if (mine := node.held.received(index, at))
        ]
        asked = [(index, each) for at, _ in wanted for each in (at, at - 1)]
        answers = await asyncio.gather(
            *(headers_at(node.transport, m, self._gossip.run, asked) for m in voters[:_ASKED])
        )
        for place, (at, mine) in enumerate(wanted):
            before = node.held.hash_of(index, at - 1)
            theirs = {
                member.peer: told[2 * place]
                for member, told in zip(voters, answers, strict=False)
                if told and before and told[2 * place + 1].hash == before
            }
            self._compare(mine, theirs, index, at)

    def _compare(
        self, mine: Sequence[Received], theirs: dict[str, pb.StateHeader], index: int, at: int
    ) -> None:
        for shard, (reducer, source, hash_) in enumerate(mine):
            found = {
                peer: header.reductions[shard]
                for peer, header in theirs.items()
                if peer != reducer
                and len(header.sources) == len(header.reductions) == len(mine)
                and header.sources[shard] == source
            }
            others = {peer: each for peer, each in found.items() if each != hash_}
            if not others or reducer == self._gossip.me.peer:
                continue
            if reducer not in self._named:
                self._named.add(reducer)
                self._warnings.add(
                    f"{reducer} gave {', '.join(sorted(others))} another reduction of version {at} "
                    f"of fragment {index} than this peer: it went back and reduced again, or one "
                    "of these lies"
                )
            if len(others) > 1 and 2 * len(others) > len(found):
                distinct = len({*others.values()}) == len(others)
                if distinct or self._doubts.again(reducer, index, at):
                    why = "each peer has" if distinct else "most others have"
                    self._node.context.caught(reducer, f"{why} another one")
