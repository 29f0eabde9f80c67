"""Where states are taken from: a donor's is fetched, checked, and confirmed by a second peer."""

import asyncio
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from murmuration.algorithms.fragment_state import FragmentState
from murmuration.algorithms.plan import Plan
from murmuration.protos.events import Warnings
from murmuration.protos.text import shown
from murmuration.worker import wire
from murmuration.worker.catchup.state_transfer import (
    HeldStates,
    confirm_states,
    fetch_states,
    rounds_apart,
    sizes_of,
)
from murmuration.worker.exchange.context import Offload
from murmuration.worker.membership import Health, Member, Phase
from murmuration.worker.membership.io import GossipService
from murmuration.worker.training.inbox import Adopt, Published, ToTrain
from murmuration.worker.transport import Transport, TransportError

_ASK_AGAIN_S = 0.25
_ASKED = 8  # peers that may confirm a state
_ASKING_S = 2.0
_ALONE_S, _ALONE_ROUNDS = 10.0, 3
_ASIDE_S = 5.0
_RETRY_S = 0.25
_AHEAD_OF_GOSSIP = 256  # rounds between what a donor has announced and what it gives


class CatchUpHost(Protocol):
    """What this asks of the node that it runs in. `partners`: of this peer's rounds in pairs."""

    transport: Transport
    offload: Offload
    published: Published | None
    held: HeldStates

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


class Donors:
    """The peers that others' states are taken from. I/O thread only."""

    def __init__(self, plan: Plan, gossip: GossipService, host: CatchUpHost) -> None:
        self._plan, self._gossip, self._host = plan, gossip, host
        self._warnings = Warnings(host.log)
        self._aside: dict[str, float] = {}  # whose states were not to be had, until when
        self._started: set[str] = set()  # donors that have begun the run as they were asked
        self._still_since = math.inf  # since when a state that nobody confirms was the only one
        self._still_at: dict[int, int] = {}
        self._begun: dict[int, wire.Incoming] = {}  # of a state whose donor has broken off

    def first_choices(self, members: Sequence[Member]) -> Sequence[Member]:
        """Those that are not set aside; all of them, where there is no other."""
        now = self._host.clock()
        return [m for m in members if now >= self._aside.get(m.peer, -math.inf)] or members

    async def fetch(
        self, donor: Member, fragments: Iterable[int], reason: str, *, goes_back: bool = False
    ) -> bool:
        """Whether the donor's states are on their way to the train thread.

        Args: goes_back: `choose_return` has chosen them, and a second peer must hold them.
        """
        host, published = self._host, self._host.published
        assert published is not None, "nothing to compare with"
        sizes = sizes_of(published.states)
        expected = {index: sizes[index] for index in fragments}
        if not self._begun and published.phase is Phase.READY:
            self._begin_with_own(donor, published, expected)
        try:
            step, states = await self._states(donor, expected)
            self._begun = {}
            self._check_announced(donor, step, states)
        except (TransportError, wire.WireError) as error:
            if isinstance(error, wire.Again) and donor.peer not in self._started:
                self._started.add(donor.peer)  # between its word and its answer
                return False
            lasting = isinstance(error, wire.WireError)
            self.set_aside(donor, str(error), _ASIDE_S if lasting else _RETRY_S)
            return False
        confirmed = await self._confirmed(donor, states)
        if confirmed is None or (goes_back and not confirmed):
            self.set_aside(donor, "no other peer has its state", _ASIDE_S)
            return False
        lost = await self._given_up(donor, published, states)
        for index, state in states.items():
            if goes_back or state.version > published.states[index].version:
                host.give_up(index, f"over for the others: {reason}")
        self._still_at = {}
        me = self._gossip.me.peer
        host.post(Adopt(donor.peer, step, states, reason, me, confirmed, lost, goes_back))
        return True

    async def _given_up(
        self, donor: Member, published: Published, states: Iterable[int]
    ) -> dict[int, int]:
        """By fragment, the rounds of this peer's that the donor's state has not got; nothing where
        it does not say, and in pairs, where every peer has a history of its own."""
        host, found = self._host, {}
        if self._plan.exchange != "pairs":
            with suppress(TransportError, wire.WireError):
                for index in states:
                    mine = published.states[index]
                    given = (host.transport, donor, self._gossip.run, index, mine, host.held)
                    if rounds := await rounds_apart(*given):
                        found[index] = rounds
        return found

    def _begin_with_own(
        self, donor: Member, published: Published, fragments: Iterable[int]
    ) -> None:
        """Before the start a donor at the same version has the same values as a rule, over another
        group. What this peer holds then counts as arrived, so that the donor sends no values."""
        for index in fragments:
            mine, theirs = published.states[index], donor.digests[index]
            if mine.version == theirs.version:
                parts = wire.state_parts(mine.anchor, mine.momentum)
                self._begun[index] = wire.Incoming.held(
                    memoryview(bytearray().join(parts)), theirs.hash
                )

    async def _states(
        self, donor: Member, expected: Mapping[int, tuple[int, int]]
    ) -> tuple[int, dict[int, FragmentState]]:
        """Raises as `fetch_states`. Nobody is blamed for what another has sent before: where the
        whole does not fit, the donor is asked for all of it."""
        host, resumes = self._host, bool(self._begun)
        given = (host.transport, donor, self._gossip.run, expected, host.offload, self._begun)
        try:
            return await fetch_states(*given)
        except wire.WireError:
            if not resumes:
                raise
            return await fetch_states(*given)

    def set_aside(self, donor: Member, reason: str, for_s: float = _ASIDE_S) -> None:
        """Its state is not taken; others come first for a while."""
        self._aside[donor.peer] = self._host.clock() + for_s
        self._warnings.add(f"fetching from {donor.peer}: {shown(reason, 200)}")

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
                text = (
                    f"fragment {index} is another state than the announced version {said.version}"
                )
                starts = donor.phase is Phase.READY and not state.version
                raise wire.Again(text) if starts else wire.WireError(text)
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
        if not seconds or (self._plan.exchange == "pairs" and donor.phase is not Phase.DONE):
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
            await asyncio.sleep(_ASK_AGAIN_S)

    async def _confirms(self, member: Member, states: Mapping[int, FragmentState]) -> bool | None:
        """None: it does not know, or does not say."""
        try:
            return await confirm_states(self._host.transport, member, self._gossip.run, states)
        except (TransportError, wire.WireError):
            return None
