"""A simulated peer's rounds in pairs: the live code, and the train side around it. A peer waits for
all anchors before it computes, as workers without overlap do, and goes on from their mean. A part
holds the task's 8 values once for each frame of the payload; only links count more."""

import math
from collections.abc import Coroutine
from dataclasses import replace

from torch import Tensor

from murmuration.algorithms.codecs import codec_by_name
from murmuration.algorithms.fragment_state import FragmentState
from murmuration.algorithms.plan import PRESETS
from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker import wire
from murmuration.worker.catchup.choices import step_of_the_others
from murmuration.worker.exchange.pairwise.pair_rounds import Pairs
from murmuration.worker.exchange.round_context import Context
from murmuration.worker.membership import Digest, Phase
from murmuration.worker.simulation.network import Sizes
from murmuration.worker.simulation.peer import VALUES, Account, Peer
from murmuration.worker.simulation.simulated_swarm import SimulatedSwarm
from murmuration.worker.training.mailbox import Begin, PrefetchedAnchor, RoundDone, RoundFailed
from murmuration.worker.transport import Stream

_VALUES_BYTES = 4 * VALUES
_MOST_FRAMES = 64  # of a part


class PairPeer(Peer):
    """One replica of `noloco`."""

    def __init__(self, swarm: SimulatedSwarm, number: int, account: Account) -> None:
        super().__init__(swarm, number, account)
        scenario, config = swarm.scenario, swarm.config
        plan = replace(PRESETS["noloco"], group_size=scenario.group_size)
        schedule = replace(plan.schedule(fragments=1, steps=scenario.rounds), inner_steps=1)
        codecs = codec_by_name(plan.anchor_codec), codec_by_name(scenario.codec)
        sizes = [codec.encoded_bytes(scenario.params) for codec in codecs]
        # A frame holds all values of the task, and counts as its share of the modelled payload.
        self._frames = min(math.ceil(max(sizes) / wire.MAX_FRAME_BYTES), _MOST_FRAMES)
        self._scales = [size / (_VALUES_BYTES * self._frames) for size in sizes]
        context = Context(
            elements=[VALUES * self._frames],
            plan=plan,
            config=replace(config, floor_mbps=config.floor_mbps * 2 / sum(self._scales)),
            frame_bytes=_VALUES_BYTES,
            **self.surroundings(),
        )
        self.pairs, self.round = Pairs(context, schedule, self, self, self.prefetched), 0
        self._outer, self._start = plan.group_update(), self.anchor
        self._awaits = False  # the anchors of the next round's group
        self._group: tuple[str, ...] = ()

    def start(self) -> None:
        self.viewed()
        self._enter(0)

    def viewed(self) -> None:
        self.as_own(lambda: self.pairs.on_view(self.swarm.view(self.number)))

    def sizes(self) -> tuple[Sizes, Sizes]:
        return self._part_sizes(), self._part_sizes()

    def _part_sizes(self) -> Sizes:
        """Sizes the messages of one end of a stream: a frame belongs to the part before it."""
        scale = 0.0

        def size(raw: bytes) -> int:
            nonlocal scale
            message = pb.PairMessage.FromString(raw)
            if message.HasField("part"):
                scale = self._scales[message.part.part]
            return round(len(message.frame.payload) * scale) if message.HasField("frame") else 0

        return size

    def on_stream(self, stream: Stream) -> Coroutine[None, None, None]:
        return self.pairs.serve(stream)

    def _enter(self, round_: int) -> None:
        done = round_ >= self.swarm.scenario.rounds
        self._awaits = round_ > 0 and not done
        self.spawn(self._advance(round_, Phase.DONE if done else Phase.TRAINING))
        if done:
            self.finish()
        elif round_ == 0:  # all have one anchor
            self.compute()

    def _advance(self, round_: int, phase: Phase = Phase.TRAINING) -> Coroutine[None, None, None]:
        self.round = round_
        self.swarm.advanced(self.number, Digest(round_, 0, 0), phase)
        state = FragmentState(round_, 0, (), self._repeated(self.anchor), self.momentum, 0)
        return self.pairs.advanced(0, state)

    def begin(self) -> None:
        self.spawn(self._hold())

    async def _hold(self) -> None:
        """Holds a round; where most have gone on without this peer, one where they are."""
        if self.swarm.may_be_left_behind(self.number, self.round):
            mine, others = (Digest(self.round, 0, 0),), self.swarm.members(self.number)
            if (at := step_of_the_others(mine, others, self.pairs.partners)) is not None:
                await self._advance(min(at, self.swarm.scenario.rounds - 1))
        g = self._outer.contribution(self._start - self.local, self.momentum)
        anchor = self._repeated(self.anchor)
        await self.pairs.begin(Begin(0, self.round, (), self._repeated(g), anchor))
        self._group = tuple(sorted({*self.pairs.partners, self.me}))

    def prefetched(self, told: PrefetchedAnchor) -> None:
        if told.round != self.round or self._start is not self.anchor:
            return
        if told.mean_anchor is not None:
            start = self._outer.early_start(told.mean_anchor[:VALUES])
            assert start is not None, "the preset's momentum is shared"
            self.local, self._start = self.local - self.anchor + start, start
        if self._awaits:
            self._awaits = False
            self.waited()
            self.compute()

    def ended(self, result: RoundDone | RoundFailed) -> None:
        """A round is over: its mean is applied, or the peer goes on from its own anchor."""
        waited_s = self.waited()
        self.account.rounds += 1
        if isinstance(result, RoundFailed):
            self.account.failed(result.reason)
            self.local, self._start = self.local - self._start + self.anchor, self.anchor
        else:
            assert result.mean_anchor is not None, "pairs exchange anchors"
            mean, mean_anchor = result.mean[:VALUES], result.mean_anchor[:VALUES]
            stepped = self._outer.step(self.anchor, self.momentum, mean, mean_anchor)
            self.anchor, self.momentum = stepped
            self.local, self._start = self.anchor.clone(), self.anchor
            if result.contributors > 1:
                self.account.syncs_s.append(waited_s)
                self.account.applied[result.round, self._group] += 1
        self._enter(result.round + 1)

    def _repeated(self, values: Tensor) -> Tensor:
        return values.repeat(self._frames)
