"""The contributions of a peer are neither dropped nor counted twice, whatever its rounds become.

A peer trains, contributes, fails, tries again, is missed, and takes over others' states, in any
order. For each element, and at every moment:

    learned = counted in the anchor + anchor - local + given away by the merge

With an outer learning rate of 1, no momentum and small dyadic numbers that holds exactly. A merge
gives away (1 - alpha) of the steps taken meanwhile, where replicas do not keep what was not sent.
"""

from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from murmuration.algorithms.codecs import codec_by_name
from murmuration.algorithms.counted import History, recorded
from murmuration.algorithms.fragment_state import Contribution, RoundResult
from murmuration.algorithms.fragments import complement, union
from murmuration.algorithms.plan import Plan
from tests.unit.algorithms.test_fragment_state import (
    Failed,
    done,
    end,
    optimizer,
    send,
    state_at,
    take_over,
)

SHARDS = ((0, 2), (2, 3), (3, 6))
ELEMENTS = 6
BASE = Plan(outer_lr=1.0, outer_momentum=0.0, overlap_steps=1)
PLANS = {
    "plain": BASE,
    "alpha": replace(BASE, merge_alpha=0.5),
    "keep": replace(BASE, codec="bf16", merge="keep"),
}


@dataclass(frozen=True)
class Last:
    """The last round that was applied. Args: anchor: before it."""

    sent: Contribution
    anchor: Tensor
    closed: dict[int, tuple[Tensor, bool]]


class Peer:
    """One peer, and what the reducers of its round in flight know."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.outer = plan, optimizer(plan, torch.zeros(ELEMENTS))
        self.local = self.outer.state.anchor.clone()
        self.learned, self.counted, self.given_away, self.since_send = (
            torch.zeros(ELEMENTS) for _ in range(4)
        )
        # By shard that has closed: its mean, and whether that is this peer's part.
        self.closed: dict[int, tuple[Tensor, bool]] = {}
        self.last: Last | None = None
        self.untold: set[int] = set()  # closed with this peer's part, of which it got no word
        self.answer: RoundResult | Failed | None = None

    # -------------------------------------------- what may happen; passed over where it cannot

    def train(self, by: list[int]) -> None:
        self.local = self.local - torch.tensor(by)
        self.learned += torch.tensor(by)
        self.since_send += torch.tensor(by)

    def contribute(self) -> None:
        if self.outer.in_flight is None:
            self.local, self.answer = send(self.outer, self.local), None
            self.since_send = torch.zeros(ELEMENTS)

    def succeed(self, others: list[int], with_me: set[int]) -> None:
        """The shards that are still open close, with this peer or without."""
        sent = self.outer.in_flight
        if sent is not None and self.answer is None:
            self.close(with_me, sent, others)
            missed = tuple(SHARDS[shard] for shard in range(3) if not self.closed[shard][1])
            self.answer = replace(
                done(sent.round, self.mean, missed, self.error(sent), contributors=1),
                parts=self.history(sent.round)[0].parts,
                sent=partial(self.decoded, sent),
            )

    def fail(self, counts: set[int], untold: set[int] = frozenset()) -> None:
        """The round comes to nothing, but some shards have closed, as this peer knows or not.

        A shard that closed in an earlier try keeps that try's part, and is told again or not."""
        sent = self.outer.in_flight
        if sent is not None and self.answer is None:
            for shard in (counts | untold) - set(self.closed):
                self.closed[shard] = (self.decoded(sent)[slice(*SHARDS[shard])], True)
                self.untold |= {shard}
            self.untold -= counts
            self.answer = Failed(tuple(SHARDS[shard] for shard in sorted(counts)), self.error(sent))

    def finish(self) -> None:
        """The answer is applied."""
        if self.outer.in_flight is None or self.answer is None:
            return
        answer, self.answer = self.answer, None
        sent, before = self.outer.in_flight, self.outer.state.anchor
        gives = not (sent.again or self.plan.keeps)
        self.local = end(self.outer, answer, self.local)
        if isinstance(answer, RoundResult):
            self.last = Last(sent, before, dict(self.closed))
            for shard in self.count():
                if gives:
                    here = slice(*SHARDS[shard])
                    self.given_away[here] += (1 - self.plan.merge_alpha) * self.since_send[here]
            self.closed, self.untold = {}, set()

    def adopt(self, others: list[int], ahead: int, told: bool) -> None:
        """Another peer has applied the round, and perhaps later ones without this peer. It says
        whom the rounds have counted, or is of a version that does not."""
        if self.outer.in_flight is not None and self.answer is None:
            self.fail(set())  # the I/O thread gives it up before the state comes
        for shard in set() if told else self.untold:
            del self.closed[shard]  # it would keep what counts: others have closed it without it
        self.close(set(), None, others)
        version, anchor = self.outer.state.version, self.outer.state.anchor
        anchor = anchor - self.mean - ahead * torch.tensor(others)
        history = self.history(version) if told else ()
        theirs = state_at(version + 1 + ahead, anchor, history=history)
        self.local = take_over(self.outer, theirs, self.local, self.arrived)
        self.count()
        self.closed, self.untold, self.answer = {}, set(), None

    def learn_of_another(self, others: list[int], with_me: set[int]) -> None:
        """Two reducers have closed shards of the last round, and the others go on from theirs."""
        last, state = self.last, self.outer.state
        if not self.plan.keeps or last is None or last.sent.round != state.version - 1:
            return
        now, self.closed, self.last = self.closed, last.closed, None
        self.count(-1)
        self.closed = {}
        self.close(with_me, last.sent, others)
        anchor, history = last.anchor - self.mean, self.history(last.sent.round)
        theirs = state_at(state.version, anchor, history=history)
        self.local = take_over(self.outer, theirs, self.local)
        self.count()
        self.closed = now

    @property
    def arrived(self) -> Failed | None:
        """The answer, as it counts where another state comes before it is applied."""
        if isinstance(self.answer, RoundResult):
            return Failed(complement(self.answer.missed, ELEMENTS), self.answer.error)
        return self.answer

    # ----------------------------------------------------------------------- what the reducers do

    @property
    def mean(self) -> Tensor:
        return torch.cat([self.closed[shard][0] for shard in range(3)])

    def close(self, with_me: set[int], sent: Contribution | None, others: list[int]) -> None:
        for shard in {0, 1, 2} - set(self.closed):
            mine = shard in with_me and sent is not None
            theirs = torch.tensor(others, dtype=torch.float32)
            mean = self.decoded(sent) if mine and sent is not None else theirs
            self.closed[shard] = (mean[slice(*SHARDS[shard])], mine)

    def count(self, times: int = 1) -> list[int]:
        """The shards that have this peer in them, which the anchor now holds."""
        mine = [shard for shard, (_, with_me) in self.closed.items() if with_me]
        for shard in mine:
            self.counted[slice(*SHARDS[shard])] += times * self.closed[shard][0]
        return mine

    def history(self, round_: int) -> History:
        """The history of a state which has the closed shards; this peer is `a`."""
        peers = [("a",) if self.closed[shard][1] else ("b",) for shard in range(3)]
        parts = [(*shard, each) for shard, each in zip(SHARDS, peers, strict=True)]
        return recorded((), round_, parts)

    def decoded(self, sent: Contribution) -> Tensor:
        codec = codec_by_name(self.plan.codec)
        return codec.decode(codec.encode(sent.values), ELEMENTS)

    def error(self, sent: Contribution) -> Tensor:
        return sent.values - self.decoded(sent)

    # -------------------------------------------------------------------------------- the invariant

    def check(self) -> None:
        found = self.counted + (self.outer.state.anchor - self.local) + self.given_away
        assert (found - self.learned).tolist() == [0] * ELEMENTS


# Multiples of 257, of which bf16 leaves something out.
NUMBERS = st.lists(st.integers(-8, 8).map(lambda k: 257 * k), min_size=ELEMENTS, max_size=ELEMENTS)
SHARDS_OF = st.sets(st.integers(0, 2))
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("train"), NUMBERS),
        st.sampled_from([("contribute",), ("finish",)]),
        st.sampled_from([("contribute",), ("finish",)]),
        st.tuples(st.just("succeed"), NUMBERS, SHARDS_OF),
        st.tuples(st.just("fail"), SHARDS_OF, SHARDS_OF),
        st.tuples(st.just("adopt"), NUMBERS, st.integers(0, 2), st.booleans()),
        st.tuples(st.just("learn_of_another"), NUMBERS, SHARDS_OF),
    ),
    max_size=30,
)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@settings(max_examples=100)
@given(EVENTS)
def test_what_is_learned_is_never_dropped_nor_counted_twice(plan, events):
    peer = Peer(plan)
    for name, *arguments in [*events, ("finish",)]:
        getattr(peer, name)(*arguments)
        peer.check()


RANGES = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)).map(sorted).map(tuple))


@given(RANGES, RANGES)
def test_ranges_cover_what_either_covers_and_the_complement_the_rest(some, others):
    both = union(some, others)
    assert list(both) == sorted(both)
    covered = [at for start, stop in both for at in range(start, stop)]
    assert covered == sorted({at for one in (*some, *others) for at in range(*one)})
    rest = complement(both, 12)
    assert all(start < stop for start, stop in rest)
    uncovered = [at for start, stop in rest for at in range(start, stop)]
    assert uncovered == [at for at in range(12) if at not in covered]
