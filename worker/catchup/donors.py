"""Where states are taken from: a donor's is confirmed by others (docs/adr/0035), and fetched."""

import asyncio
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING

from murmuration.algorithms.fragment_state import FragmentState
from murmuration.algorithms.plan import Plan
from murmuration.protos import murmuration_pb2 as pb
from murmuration.protos.addresses import check_name
from murmuration.protos.events import Warnings
from murmuration.protos.figures import shown
from murmuration.worker import wire
from murmuration.worker.background import Offload
from murmuration.worker.catchup.held_states import REMEMBERED, HeldStates
from murmuration.worker.membership import Digest, Health, Member, Phase
from murmuration.worker.membership.gossip import GossipService
from murmuration.worker.membership.swim import MAX_MEMBERS
from murmuration.worker.training.mailbox import Adopt, Published
from murmuration.worker.transport import Method, Stream, Transport, TransportError

if TYPE_CHECKING:
    from murmuration.worker.node.node import Node

_ASK_AGAIN_S = 0.25
_ANY_GROUP = 256  # peers; a larger one takes a second to lay out
_ASKED = 16  # peers, drawn of those that may confirm a state
_ASKING_S = 2.0
_TOLD_S, _TOLD_ROUNDS = 10.0, 3  # for which a donor is not confirmed before that is said
_ASIDE_S, _MOST_ASIDE_S = 5.0, 600.0
_UNCONFIRMED_S = 1.0
_MOST_SPLITS = 64  # rounds between two adoptions of a state of the same version
_RETRY_S = 0.25
_HELPERS = 3
_SHARED = 2  # a donor's link is that of its rounds too
_NEARLY_ROUNDS = 4
CHUNK_BYTES = 16 << 20  # that one of several donors gives at once
_CONFIRM_S = 3.0
_NEXT_S = 10.0
_WHO_SPEAKS = ({Phase.DONE, Phase.LEAVING}, {Phase.READY})


@dataclass(frozen=True)
class Electorate:
    """The others whose word counts, and whether this peer's own does (`counts_me`)."""

    others: tuple[Member, ...]
    counts_me: bool
    known: bool  # they have contributed to rounds of this peer; else these are all that train
    # As many as stay where they are may be enough; not for one that has just joined.
    may_tie: bool = True

    @property
    def size(self) -> int:
        return len(self.others) + self.counts_me


def electorate(
    mine: Sequence[Digest], phase: Phase, replicas: Iterable[Member], contributors: Collection[str]
) -> Electorate:
    """Says whose word counts for a peer with these digests. One that has closed no round since it
    began or joined follows most of those that train. Args: contributors: to its rounds."""
    alive = [m for m in replicas if m.health is Health.ALIVE and len(m.digests) == len(mine)]
    begun = [m for m in alive if m.phase is not Phase.READY or any(d.version for d in m.digests)]
    trains, has_rounds = phase is not Phase.READY, any(digest.version for digest in mine)
    found = [member for member in begun if member.peer in contributors]
    known = bool(found)
    # Before the first round those speak too that have yet to start it with this peer.
    first = {Phase.TRAINING, Phase.READY} if trains and not has_rounds else {Phase.TRAINING}
    for phases in (first, *_WHO_SPEAKS):
        found = found or [member for member in alive if member.phase in phases]
    all_ready = all(member.phase is Phase.READY for member in found)
    if phase is Phase.TRAINING and has_rounds and not contributors:
        return Electorate(tuple(found), counts_me=False, known=known, may_tie=False)
    counts_me = trains or (has_rounds and all_ready)
    return Electorate(tuple(found), counts_me, known, trains or has_rounds or all_ready)


@dataclass(frozen=True)
class Votes:
    """Counts what the electorate says of a donor's states."""

    among: Electorate
    holders: tuple[str, ...]  # others that hold them, or have held them
    keepers: int  # with this peer, on the other way that most follow (`most_on_a_way`)
    undecided: int  # those that do not know the states, or have not answered

    @property
    def majority(self) -> bool:
        return 2 * len(self.holders) > self.among.size

    @property
    def enough(self) -> bool:
        """Nobody is outnumbered by taking over the donor's."""
        return self.majority or (self.among.may_tie and len(self.holders) >= self.keepers)

    @property
    def lost(self) -> bool:
        """Whatever the undecided say yet, it is not enough."""
        most = len(self.holders) + self.undecided
        return 2 * most <= self.among.size and not (self.among.may_tie and most >= self.keepers)


# The hashes of the states that a peer has, or has had, by fragment and version; 0: not known.
Had = Mapping[tuple[int, int], int]


def confirms(had: Had, states: Mapping[int, FragmentState | Digest]) -> bool | None:
    """Tells whether a peer has had all these; None when it does not know some of them."""
    pairs = [(had.get((index, state.version), 0), state.hash) for index, state in states.items()]
    if any(hash_ not in (0, asked) for hash_, asked in pairs):
        return False
    return None if any(not hash_ for hash_, _ in pairs) else True


def most_on_a_way(at: Mapping[str, Mapping[int, Digest]], had: Mapping[str, Had]) -> int:
    """Counts the peers on the way that most are on; 1 at least. A way is all that a peer has `had`.
    On it are those that are there, and those that it has left behind. In some fragments these may
    be ahead of it, where they have had what it has there. Args: at: where each is, by fragment."""
    steps = {peer: sum(each.version for each in digests.values()) for peer, digests in at.items()}

    def one_way(peer: str, other: str) -> bool:
        return steps[other] <= steps[peer] and all(
            had[peer].get((index, theirs.version)) == theirs.hash
            or had[other].get((index, its.version)) == its.hash
            for (index, its), theirs in zip(at[peer].items(), at[other].values(), strict=True)
        )

    return max((1 + sum(o != p and one_way(p, o) for o in at) for p in at), default=1)


class Donors:
    """The peers that others' states are taken from. I/O thread only."""

    def __init__(self, plan: Plan, gossip: GossipService, node: "Node") -> None:
        self._plan, self._gossip, self._node = plan, gossip, node
        self._warnings = Warnings(node.log)
        self._aside: dict[str, float] = {}  # whose states were not to be had, until when
        self._started: dict[str, float] = {}  # donors that began the run as they were asked: when
        self._held_s = defaultdict[str, float](float)  # by donors whose states were not to be had
        self._split: dict[int, tuple[int, int]] = {}  # what was to be adopted of the same version
        self._splits, self._next_split_at = 0, -math.inf
        self._unconfirmed: dict[str, float] = {}  # donors that too few confirm, since when
        self._begun: dict[int, wire.Incoming] = {}  # of a state whose donor has broken off
        self._adopts = 0  # that have gone to the train thread
        self.apart_since = math.inf  # when a state was first too far from this peer's

    def first_choices(self, members: Sequence[Member]) -> Sequence[Member]:
        """Those that are not set aside; all of them, where there is no other."""
        now = self._node.clock()
        return [m for m in members if now >= self._aside.get(m.peer, -math.inf)] or members

    async def fetch(
        self, donor: Member, fragments: Iterable[int], reason: str, *, goes_back: bool = False
    ) -> bool:
        """Fetches the donor's states; False: none are on their way to the train thread. Args:
        goes_back: `choose_return` has chosen them, and a second peer must hold them."""
        node, published = self._node, self._node.published
        assert published is not None, "nothing to compare with"
        if published.adopts < self._adopts:
            return False  # the train thread is busy: another would wait behind the last
        own = published.states
        expected = {i: (own[i].anchor.numel(), own[i].momentum.numel()) for i in fragments}
        announced: dict[int, FragmentState | Digest] = {i: donor.digests[i] for i in expected}
        parted = {i for i in expected if own[i].version == donor.digests[i].version}
        same = parted == {*expected} and published.phase is Phase.TRAINING
        if same and self._rests(published):
            return False
        votes = await self._votes(donor, announced)
        if not self._enough(donor, votes, goes_back=goes_back):
            return False
        self.apart_since = math.inf if votes and votes.majority else self.apart_since
        if not self._begun and published.phase is Phase.READY:
            await self._begin_with_own(donor, published, expected)
        began = node.clock()
        try:
            step, states = await self._states(donor, expected)
            self._begun = {}
            self._check_announced(donor, step, states)
        except (TransportError, TimeoutError, wire.WireError) as error:
            if isinstance(error, wire.Again):  # between its word and its answer
                began_at = self._started.setdefault(donor.peer, node.clock())
                if node.clock() - began_at < _ASIDE_S:
                    return False
            # One that holds this peer up is asked again the later, the longer it has done so.
            self._held_s[donor.peer] += node.clock() - began
            least_s = _RETRY_S if isinstance(error, TransportError) else _ASIDE_S
            aside_s = max(least_s, 2 * self._held_s[donor.peer])
            self.set_aside(donor, str(error), min(aside_s, _MOST_ASIDE_S))
            return False
        said = {index: (at.version, at.hash) for index, at in announced.items()}
        if said != {index: (state.version, state.hash) for index, state in states.items()}:
            votes = await self._votes(donor, states)  # it has gone on meanwhile
            if not self._enough(donor, votes, goes_back=goes_back):
                return False
        if not await self._plausible(published, votes, states):
            self._do_without(donor, "its state is too far from this peer's, and too few have it")
            self.apart_since = min(self.apart_since, node.clock())
            return False
        self._unconfirmed.pop(donor.peer, None)
        self._split = {i: (s.version, s.hash) for i, s in states.items()} if same else {}
        lost = await self._given_up(donor, published, states)
        own = (node.published or published).states  # it may have gone on meanwhile
        replaced = frozenset(states if goes_back else parted)
        for index, state in states.items():
            if index in replaced or state.version > own[index].version:
                node.give_up(index, f"over for the others: {reason}")
        confirmed = () if votes is None else tuple(p for p in votes.holders if p != donor.peer)
        me = self._gossip.me.peer
        node.held.shares((donor.peer, *confirmed), states)
        self._adopts += 1
        step = min(step, self._as_far(donor, "step", _NEARLY_ROUNDS * self._plan.inner_steps))
        if votes is None:  # in pairs a version is a place in the schedule, which nobody confirms
            most = self._as_far(donor, "version", _NEARLY_ROUNDS)
            states = {i: replace(s, version=min(s.version, most)) for i, s in states.items()}
        node.post(Adopt(donor.peer, step, states, reason, me, confirmed, lost, replaced))
        behind = any(state.version > own[i].version + 1 for i, state in states.items())
        if self._plan.waits_for_nobody and published.phase is Phase.TRAINING and behind:
            self._gossip.leave_out(me)  # it does not keep up
        return True

    def _as_far(self, donor: Member, what: str, slack: int) -> int:
        """The furthest place in the schedule: where half of those that train are, nearly."""
        peers = [m for m in self._gossip.replicas if m.health is Health.ALIVE]
        train = (m for m in peers if m.phase is Phase.TRAINING or m.peer == donor.peer)
        at: list[int] = sorted(getattr(member, what) for member in train)
        return (at[(len(at) - 1) // 2] if at else getattr(donor, what)) + slack

    def _rests(self, published: Published) -> bool:
        """Tells whether to wait with a state of the same version: a peer that parts them often
        causes few adoptions. The next comes after a round, then two, then four, and so on."""
        now, hash_of = self._node.clock(), self._node.held.hash_of
        if any(hash_of(i, version) == hash_ for i, (version, hash_) in self._split.items()):
            self._split = {}  # that was taken
            round_s = max(1.0, self._plan.inner_steps * published.step_s)
            again = now < self._next_split_at + _MOST_SPLITS * round_s
            self._splits = min(2 * self._splits, _MOST_SPLITS) if again else 1
            self._next_split_at = now + self._splits * round_s
        return now < self._next_split_at

    async def _given_up(
        self, donor: Member, published: Published, states: Iterable[int]
    ) -> dict[int, int]:
        """This peer's rounds that the donor's state lacks, by fragment; none in pairs."""
        pairs = self._plan.exchange == "pairs"
        versions = {} if pairs else {index: published.states[index].version for index in states}
        found = {i: await self._rounds_apart(donor, i, at) for i, at in versions.items()}
        return {index: rounds for index, rounds in found.items() if rounds}

    async def _rounds_apart(self, donor: Member, fragment: int, version: int) -> int:
        """How many of the latest rounds in this state the donor never had: 0 for a peer that is
        only behind, or does not say; more where a partition has made two histories of one."""
        node = self._node
        versions = node.held.versions(fragment, version)[:REMEMBERED]
        for asked in (versions[:1], versions[1:]):  # nearly always the newest is one that it had
            wanted = [(fragment, each) for each in asked]
            headers = await headers_at(node.transport, donor, self._gossip.run, wanted)
            if len(headers) < len(asked):
                return 0
            for each, theirs in zip(asked, headers, strict=True):
                if theirs.hash == node.held.hash_of(fragment, each):
                    return version - each
        return version - versions[-1] if versions else 0

    async def _begin_with_own(
        self, donor: Member, published: Published, fragments: Iterable[int]
    ) -> None:
        """Before the start a donor at one version mostly has the same values: it sends none."""
        for index in fragments:
            mine, theirs = published.states[index], donor.digests[index]
            if mine.version == theirs.version:
                copy = partial(wire.state_bytes, mine.anchor, mine.momentum)
                whole = await self._node.offload(copy)
                self._begun[index] = wire.Incoming(len(whole), theirs.hash, whole)

    async def _states(
        self, donor: Member, expected: Mapping[int, tuple[int, int]]
    ) -> tuple[int, dict[int, FragmentState]]:
        """Raises as `fetch_states`. Nobody is blamed for what another has sent: where the whole
        does not fit, the donor is asked for all of it."""
        node, rounds = self._node, self._node.context.config
        # Others that hold the same, as many as chunks at most, in this peer's own order.
        chunks = sum(4 * sum(sizes) for sizes in expected.values()) // CHUNK_BYTES
        me, hashes = self._gossip.me.peer, [donor.digests[index].hash for index in expected]
        others = (m for m in self._gossip.replicas if m.peer != donor.peer and m.digests)
        alike = [m for m in others if [m.digests[index].hash for index in expected] == hashes]
        alike.sort(key=lambda member: wire.hash64(f"{me}/{member.peer}".encode()))
        helpers = alike[: min(_HELPERS, chunks)]
        alone = not (self._begun or helpers)
        pace = rounds.transfer_s(wire.MAX_FRAME_BYTES) + rounds.slack_s, rounds.transfer_s(1)
        given = (node.transport, donor, self._gossip.run, expected, node.offload)
        try:
            return await fetch_states(*given, pace, self._begun, helpers)
        except wire.WireError:
            if alone:
                raise
            return await fetch_states(*given, pace)

    def set_aside(self, donor: Member, reason: str, for_s: float = _ASIDE_S) -> None:
        """Its state is not taken; others come first for a while."""
        self._aside[donor.peer] = self._node.clock() + for_s
        self._warnings.add(f"fetching from {donor.peer}: {shown(reason, 200)}", by=donor.peer)

    def _do_without(self, donor: Member, reason: str) -> None:
        self.set_aside(donor, reason)
        published = self._node.published
        if published is not None and published.failed:  # the donor's rounds are others
            self._gossip.leave_out(donor.peer)

    def _check_announced(
        self, donor: Member, step: int, states: Mapping[int, FragmentState]
    ) -> None:
        """Raises WireError: this is not what the donor has announced, nor what can follow it."""
        heard = (m for m in self._gossip.members if m.peer == donor.peer and m.digests)
        newest = next(heard, donor)  # without digests it has just started again
        most, limits = max(_ANY_GROUP, 2 * len(self._gossip.members)), self._gossip.limits
        for index, state in states.items():
            if len(state.group) > most:
                raise wire.WireError(f"fragment {index}: a group of {len(state.group)} peers")
            said, at = donor.digests[index], state.version
            if at < said.version or (at == said.version and state.hash != said.hash):
                kind = wire.WireError if at else wire.Again
                raise kind(f"fragment {index} is another state than the announced {said.version}")
            if not limits.can_follow(at, newest.digests[index].version):
                raise wire.WireError(
                    f"fragment {index} of version {at}, announced was {said.version}"
                )
        if problem := limits.progress_problem(0, step):
            raise wire.WireError(problem)

    def voters(self) -> Electorate:
        """The peers whose word counts: they are reached, and have given no false mean."""
        gossip, published = self._gossip, self._node.published
        assert published is not None, "this peer knows what it has"
        mine, out = gossip.me.digests, gossip.view.cut_off | self._node.context.quarantine.liars
        reached = (member for member in gossip.replicas if member.peer not in out)
        found = electorate(mine, published.phase, reached, self._node.held.contributors)
        for member in found.others:
            self._node.held.heard(member)
        return found

    async def _votes(
        self, donor: Member, states: Mapping[int, FragmentState | Digest]
    ) -> Votes | None:
        """Asks the peers whose word counts about the states. A peer that does not know them yet is
        asked again for a while. None in pairs before the end, where all states differ."""
        if self._plan.exchange == "pairs" and donor.phase is not Phase.DONE:
            return None
        node, me, among = self._node, self._gossip.me, self.voters()
        if len(among.others) > _ASKED:
            drawn = node.rng.sample(among.others, _ASKED)  # nobody knows before whom
            among = replace(among, others=tuple(drawn))
        counted = (*among.others, me) if among.counts_me else among.others
        at = {member.peer: {i: member.digests[i] for i in states} for member in counted}
        asked = [*dict.fromkeys((i, e[i].version) for e in (states, *at.values()) for i in states)]
        had = {me.peer: {each: node.held.hash_of(*each) for each in asked}}
        holders = {donor.peer} & {member.peer for member in among.others}
        open_ = [member for member in among.others if member.peer != donor.peer]
        until = node.clock() + _ASKING_S
        while True:
            told = await asyncio.gather(
                *(headers_at(node.transport, m, self._gossip.run, asked) for m in open_)
            )
            for member, headers in zip(open_, told, strict=True):
                hashes = [header.hash for header in headers] or [0] * len(asked)
                had[member.peer] = dict(zip(asked, hashes, strict=True))
            answers = [confirms(had[member.peer], states) for member in open_]
            holders |= {m.peer for m, answer in zip(open_, answers, strict=True) if answer}
            open_ = [m for m, answer in zip(open_, answers, strict=True) if answer is None]
            others = {p: each for p, each in at.items() if p not in holders}
            kept = most_on_a_way(others, had)
            votes = Votes(among, tuple(sorted(holders)), kept, len(open_))
            if not open_ or votes.majority or votes.lost or node.clock() >= until:
                return votes
            await asyncio.sleep(_ASK_AGAIN_S)

    def _enough(self, donor: Member, votes: Votes | None, *, goes_back: bool) -> bool:
        """Tells whether enough hold the donor's states; else it is set aside, and after a while
        that is said once. Others that are behind may be about to hold them."""
        if votes is None or votes.majority or (votes.enough and not goes_back):
            return True
        published, now = self._node.published, self._node.clock()
        assert published is not None, "there was something to compare with"
        since = self._unconfirmed.setdefault(donor.peer, now)
        if now - since >= max(_TOLD_S, _TOLD_ROUNDS * self._plan.inner_steps * published.step_s):
            others = [peer for peer in votes.holders if peer != donor.peer]
            besides = f"only {', '.join(others)} has its state" if others else ""
            self._do_without(donor, besides or "no other peer has its state")
        else:
            self._aside[donor.peer] = now + _UNCONFIRMED_S
        return False

    async def _plausible(
        self, published: Published, votes: Votes | None, states: Mapping[int, FragmentState]
    ) -> bool:
        """Tells whether the states can follow from this peer's own, where votes alone do not do."""
        if votes is None or (votes.majority and (votes.among.known or not votes.among.counts_me)):
            return True
        alone = self._plan.exchange == "pairs" and not self._node.held.contributors
        if alone or not any(published.states[index].version for index in states):
            return True  # it has no rounds to lose
        held = self._node.held
        return not await self._node.offload(
            lambda: held.too_far(published.states, states, votes.holders)
        )


async def serve_states(
    stream: Stream, run: int, published: Published | None, held: HeldStates
) -> None:
    """Answers Fetches with what this peer has committed as the stream begins, if anything."""
    raw = await stream.receive()
    with suppress(TimeoutError):
        while raw is not None and published is not None:
            request = wire.parse(pb.FetchRequest, raw)
            if request.run != run:
                return
            await _answer(stream, request, published, held)
            async with asyncio.timeout(_NEXT_S):
                raw = await stream.receive()


async def _answer(
    stream: Stream, request: pb.FetchRequest, published: Published, held: HeldStates
) -> None:
    if len(request.fragments) > len(published.states) * (REMEMBERED if request.versions else 1):
        raise wire.WireError(f"{len(request.fragments)} fragments of {len(published.states)}")
    if request.versions:
        for index, version in zip(request.fragments, request.versions, strict=False):
            received = held.received(index, version)
            known = pb.StateHeader(
                fragment=index,
                version=version,
                hash=held.hash_of(index, version),
                sources=[source for _, source, _ in received],
                reductions=[hash_ for *_, hash_ in received],
            )
            await stream.send(pb.FetchReply(header=known).SerializeToString())
        return
    asked = (request.fragments, request.hashes, request.offsets, request.lengths)
    for index, hash_, offset, length in zip_longest(*asked):
        if index is None or index >= len(published.states):
            raise wire.WireError(f"fragment {index} of {len(published.states)}")
        state = published.states[index]
        parts = wire.state_parts(state.anchor, state.momentum)
        header = pb.StateHeader(
            fragment=index,
            version=state.version,
            contributors=state.contributors,
            group=state.group,
            total_bytes=sum(map(len, parts)),
            hash=state.hash,
            step=published.entry_step,
            history=wire.history_to_message(state.history),
        )
        await stream.send(pb.FetchReply(header=header).SerializeToString())
        begin = offset or 0 if hash_ == state.hash else 0
        if length is not None:
            end = begin + length if hash_ == state.hash else 0
            parts = [parts[0][:end], parts[1][: max(0, end - len(parts[0]))]]
        for message, _ in wire.frame_messages(pb.FetchReply, parts, begin):
            await stream.send(message)


async def fetch_states(
    transport: Transport,
    donor: Member,
    run: int,
    expected: Mapping[int, tuple[int, int]],
    offload: Offload,
    pace: tuple[float, float] = (40.0, 1e-5),
    begun: dict[int, wire.Incoming] | None = None,
    helpers: Sequence[Member] = (),
) -> tuple[int, dict[int, FragmentState]]:
    """Fetches fragments from one peer, which says what states these are, and from others that have
    the same. Returns (where a joiner goes on in the schedule, verified states by fragment). Raises
    TransportError, TimeoutError, WireError: nothing was taken. Args: helpers: as many as there are
    chunks at most; expected: by fragment, the values of its anchor and of its momentum; pace: for
    how long a donor may be silent, and how long a byte takes (s); begun: what has arrived, for the
    next donor to go on with."""
    opened = [transport.open(m.address, Method.FETCH, m.peer) for m in (donor, *helpers)]
    byte_s = _SHARED * len(opened) * pace[1]  # they may all come over one link
    streams = [_Source(each, pace[0], byte_s) for each in opened]
    source, begun = streams[0], {} if begun is None else begun
    stream = source.stream
    try:
        order = sorted(expected)
        arrived = [begun.get(index) or wire.Incoming(0, 0) for index in order]
        request = pb.FetchRequest(
            run=run,
            fragments=order,
            offsets=[each.received_bytes for each in arrived],
            hashes=[each.hash for each in arrived],
            lengths=[0 for _ in order if helpers],
        )
        await stream.send(request.SerializeToString())
        if not helpers:
            await stream.done()
        headers: dict[int, pb.StateHeader] = {}
        for index in order:
            headers[index] = (await source.next()).header
            _check_header(headers[index], index, expected[index], begun)
            while not (helpers or begun[index].complete):
                begun[index].add((await source.next()).frame)
        if helpers:
            await _share_out(streams, run, {index: begun[index] for index in order})
        states = {
            index: await _state(headers[index], begun[index], expected[index], offload)
            for index in order
        }
        return headers[order[-1]].step, states
    except wire.WireError:
        begun.clear()  # whoever it was that sent a part which does not fit
        raise
    finally:
        for each in streams:
            each.stream.cancel()


async def _share_out(
    streams: "Sequence[_Source]", run: int, begun: Mapping[int, wire.Incoming]
) -> None:
    """Has each donor give chunks until all are here. One that is free gives the chunk that was
    asked for longest ago: nothing waits for a slow one. Raises TransportError: some are missing."""
    chunks = [
        (index, begin, whole.part(begin, min(begin + CHUNK_BYTES, whole.total_bytes)))
        for index, whole in begun.items()
        for begin in range(whole.received_bytes, whole.total_bytes, CHUNK_BYTES)
    ]
    missing = {chunk: index for index, _, chunk in chunks}

    async def give(source: _Source) -> None:
        with suppress(TransportError, TimeoutError, wire.WireError):  # it has broken off
            while missing:
                chunk, index = next(iter(missing.items()))
                missing[chunk] = missing.pop(chunk)  # the last one to be asked for
                begin, end = chunk.received_bytes, chunk.total_bytes
                part, ask = chunk.part(begin, end), {"offsets": [begin], "lengths": [end - begin]}
                request = pb.FetchRequest(run=run, fragments=[index], hashes=[part.hash], **ask)
                await source.stream.send(request.SerializeToString())
                if (await source.next()).header.hash != part.hash:
                    return  # it has gone on
                while not part.complete:
                    part.add((await source.next()).frame)
                    if chunk not in missing:
                        return  # another was faster
                    chunk.received_bytes = max(chunk.received_bytes, part.received_bytes)
                del missing[chunk]
            for each in giving:
                each.cancel()

    giving: list[asyncio.Task[None]] = []
    async with asyncio.TaskGroup() as group:
        giving += [group.create_task(give(each)) for each in streams]
    for index, begin, chunk in chunks:
        if begun[index].received_bytes == begin:
            begun[index].received_bytes = chunk.received_bytes
    if missing:
        raise TransportError(f"{len(missing)} of {len(chunks)} chunks are missing")


async def headers_at(
    transport: Transport, donor: Member, run: int, asked: Sequence[tuple[int, int]]
) -> list[pb.StateHeader]:
    """Headers of each (fragment, version), of hash 0 if not known; none without an answer."""
    if not asked:
        return []
    stream = transport.open(donor.address, Method.FETCH, donor.peer)
    try:
        fragments, versions = zip(*asked, strict=True)
        request = pb.FetchRequest(run=run, fragments=fragments, versions=versions)
        await stream.send(request.SerializeToString())
        await stream.done()
        async with asyncio.timeout(_CONFIRM_S):
            source = _Source(stream, _CONFIRM_S, 0.0)
            return [(await source.next()).header for _ in asked]
    except (TimeoutError, TransportError, wire.WireError):
        return []
    finally:
        stream.cancel()


class _Source:
    """The answers of a donor, which keeps a pace but for a pause. Args: silent_s: all that it may
    pause; byte_s: of a byte, that makes a pause good."""

    def __init__(self, stream: Stream, silent_s: float, byte_s: float) -> None:
        self.stream, self._silent_s, self._byte_s = stream, silent_s, byte_s
        self._left_s = silent_s

    async def next(self) -> pb.FetchReply:
        now = asyncio.get_running_loop().time
        began = now()
        try:
            async with asyncio.timeout(self._left_s):
                raw = await self.stream.receive()
        except TimeoutError as error:
            raise TimeoutError(f"the donor has sent nothing for {self._silent_s:.0f} s") from error
        if raw is None:
            raise TransportError("the donor has nothing more to give")
        left_s = self._left_s - (now() - began) + self._byte_s * len(raw)
        self._left_s = min(left_s, self._silent_s)
        return wire.parse(pb.FetchReply, raw)


def _check_header(
    header: pb.StateHeader, index: int, sizes: tuple[int, int], begun: dict[int, wire.Incoming]
) -> None:
    """Checks a header; its state arrives in `begun`. Raises WireError."""
    total_bytes = 4 * sum(sizes)
    if header.fragment != index or header.total_bytes != total_bytes:
        raise wire.WireError(
            f"fragment {header.fragment} of {header.total_bytes} bytes; "
            f"expected {index} of {total_bytes}"
        )
    group = header.group
    if max(len(group), header.contributors) > MAX_MEMBERS or len({*group}) < len(group):
        raise wire.WireError(f"fragment {index}: a group of {len(group)} peers, or one twice")
    for name in group:
        check_name(name, wire.WireError)
    incoming = begun.get(index)
    if incoming is None or (incoming.hash, incoming.total_bytes) != (header.hash, total_bytes):
        begun[index] = wire.Incoming(total_bytes, header.hash)


async def _state(
    header: pb.StateHeader, incoming: wire.Incoming, sizes: tuple[int, int], offload: Offload
) -> FragmentState:
    """Makes a state of what has arrived. Raises WireError: it does not fit together."""
    index, group = header.fragment, tuple(header.group)
    history = wire.history_from_message(header.history, sizes[0], MAX_MEMBERS)
    anchor, momentum = wire.split_state(incoming.raw, sizes)
    if await offload(lambda: wire.state_hash(anchor, momentum, group)) != header.hash:
        raise wire.WireError(f"fragment {index} is damaged: its hash differs")
    if not await offload(lambda: wire.is_finite(anchor) and wire.is_finite(momentum)):
        raise wire.WireError(f"fragment {index} holds NaN, Inf or absurdly large values")
    known = (header.version, header.contributors, group, anchor, momentum, header.hash)
    return FragmentState(*known, history=history, told_until=header.version)
