"""A swarm whose trainers draw numbered samples of a stream that is leased in blocks."""

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from murmuration.algorithms.plan import Plan
from murmuration.worker.leases import LeasedBlocks, SampleStream
from murmuration.worker.leases.ledger import LeaseMessage
from murmuration.worker.training.mailbox import Stop
from tests.protocol.problem import Problem, Synthetic
from tests.protocol.swarm import Held, Swarm
from tests.protocol.train_side import TrainSide

Sample = tuple[int, int]  # epoch and place in it


class Draws:
    """The samples that one peer draws, epoch after epoch.

    Args:
        samples: what all peers have drawn: it is added to."""

    def __init__(
        self, train: TrainSide, stream: SampleStream, batch: int, samples: list[Sample]
    ) -> None:
        self._train, self._stream, self._batch = train, stream, batch
        self._samples, self.ended_calls = samples, 0
        self._blocks: LeasedBlocks | None = None

    def batch(self) -> None:
        """One batch, as `Swarm.shard` gives it to a loop."""
        while True:
            if self._blocks is None:
                self._blocks = LeasedBlocks(
                    self._stream, self._batch, self._train.post, self._receive, self.ended_calls
                )
            runs = self._blocks.take(self._batch)
            drawn = [
                (run.epoch, run.block.place * self._stream.block + at)
                for run in runs
                for at in range(run.begin, run.end)
            ]
            if drawn:
                self._blocks.use(len(drawn))
                self._samples += drawn
                return
            if self._blocks.run_is_over:
                return
            self._blocks.close()
            self._blocks = None
            self.ended_calls += 1

    def close(self) -> None:
        if self._blocks is not None:
            self._blocks.close()

    def _receive(self) -> LeaseMessage | None:
        message = self._train.wait_lease()
        return None if isinstance(message, Stop) else message


class Drawing(Synthetic):
    """Draws a batch for each inner step."""

    draws: Draws

    def backward(self, step: int) -> Mapping[str, Tensor]:
        self.draws.batch()
        return super().backward(step)


class DrawingSwarm(Swarm):
    """Args: stream, batch: what is drawn, and how much for each step."""

    def __init__(
        self,
        problem: Problem,
        stream: SampleStream,
        names: str = "",
        *,
        batch: int = 4,
        delay_s: float = 0.01,
    ) -> None:
        super().__init__(problem, names, delay_s=delay_s)
        self.stream, self.batch = stream, batch
        self.samples: dict[str, list[Sample]] = {}

    def part(self, problem: Problem, name: str, train: TrainSide) -> Held:
        replica = Drawing(problem, name, train.computes)
        replica.draws = Draws(train, self.stream, self.batch, self.samples.setdefault(name, []))
        return Held(replica, problem.fragments)

    async def leave(self, name: str) -> None:
        peer = self.peers[name]
        peer.train.answer(Stop("SIGTERM"))
        await self.until(lambda: peer.done, 30)
        peer.killed = True  # it is gone, in good order
        peer.replica.draws.close()
        for message in peer.train.left():
            peer.node.deliver(message)
        peer.node.close()

    def deaths_are_known(self) -> bool:
        """Tells whether all that live know which peers do not."""
        alive = {peer.name for peer in self.alive}
        return all(
            member["peer"] in alive or member["health"] in ("dead", "left")
            for peer in self.alive
            for member in peer.members
        )

    def is_past(self, name: str) -> bool:
        """Tells whether a peer has drawn some blocks of later epochs only: what was left of the
        first comes before these."""
        drawn = self.samples[name][-4 * self.stream.block :]
        return len(drawn) == 4 * self.stream.block and all(epoch > 0 for epoch, _ in drawn)

    def counted(self, epoch: int) -> "Counts":
        """How often each sample of an epoch was drawn."""
        times = Counter(s for drawn in self.samples.values() for s in drawn if s[0] == epoch)
        assert self.stream.length is not None
        each = Counter(times[epoch, place] for place in range(self.stream.length))
        return Counts(each[0], each[1], sum((n - 1) * each[n] for n in each if n))


@dataclass(frozen=True)
class Counts:
    """Samples of an epoch by how often they were drawn; `again` are draws beyond the first."""

    never: int
    once: int
    again: int


@dataclass(frozen=True)
class Churn:
    """Two joins, a leave and two kills of a swarm of four, within the first epoch of its samples.

    Args:
        seed: of when each comes, and of who leaves and who dies."""

    seed: int
    stream: SampleStream
    batch: int = 4
    delay_s: float = 0.01

    async def run(self) -> Counts:
        """Goes on until nobody draws of the first epoch any more."""
        rng = random.Random(self.seed)
        problem = Problem(steps=1200, plan=Plan(inner_steps=10), seed=self.seed)
        links = {"batch": self.batch, "delay_s": self.delay_s}
        async with DrawingSwarm(problem, self.stream, "abcd", **links) as swarm:
            events = rng.sample(["join e", "join f", "leave", "kill", "kill"], 5)
            for event in events:
                await swarm.sleep(rng.uniform(0.3, 4.0))
                stay = [peer.name for peer in swarm.alive]
                match event.split():
                    case "join", name:
                        first = rng.choice(stay)  # which may die before others know of this one
                        await swarm.join(name, via=sorted(stay, key=lambda peer: peer != first))
                    case ["leave"]:
                        await swarm.leave(rng.choice(stay))
                    case ["kill"]:
                        swarm.kill(rng.choice(stay))
            await swarm.until(swarm.deaths_are_known, 60)
            known = {name: len(drawn) for name, drawn in swarm.samples.items()}
            more = 8 * (self.stream.block + self.batch)  # what was free by then comes among these
            await swarm.until(
                lambda: all(
                    swarm.is_past(peer.name)
                    and len(swarm.samples[peer.name]) > known[peer.name] + more
                    for peer in swarm.alive
                ),
                200,
            )
            return swarm.counted(0)

    @property
    def most_again(self) -> int:
        """Draws that two kills may repeat."""
        return 2 * max(self.stream.block, 2 * self.batch)
