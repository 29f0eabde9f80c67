"""A simulated peer: inner steps, then a round of the live code, and where the time goes. What peers
learn is a bowl whose bottom is known, each with noise of its own."""

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from murmuration.algorithms.link import lognormal
from murmuration.worker.background import Tasks
from murmuration.worker.exchange.measured import Arrivals, Compression, ExchangeConfig
from murmuration.worker.simulation.network import SimulatedStream, Sizes, StreamEnd, open_stream
from murmuration.worker.simulation.simulated_swarm import RUN, SimulatedSwarm
from murmuration.worker.simulation.virtual_loop import Act, context_of
from murmuration.worker.training.mailbox import RoundDone, RoundFailed
from murmuration.worker.transport import Stream, TransportError

T = TypeVar("T")

VALUES = 8
_CURVATURE = np.linspace(0.25, 1.0, VALUES)
_INNER_LR = 0.02
_NOISE = 0.5  # standard deviation of a gradient


def descended(x: Tensor, steps: int, rng: np.random.Generator) -> Tensor:
    """The values after this many inner steps of SGD, with noisy gradients of the mean
    f(x) = 1/2 sum_k h_k (x_k - 1)^2: the steps' sum is normal, and its moments are known."""
    shrink, deviation = _moments(steps)
    noise = rng.standard_normal(VALUES) * deviation
    return ((x - 1) * shrink).add_(1).add_(torch.from_numpy(noise))


@cache
def _moments(steps: int) -> tuple[Tensor, NDArray[np.float64]]:
    """By how much the way to the optimum shrinks, and the standard deviation at its end."""
    rate = 1 - _INNER_LR * _CURVATURE
    variance = (1 - rate ** (2 * steps)) / (1 - rate**2) * (_INNER_LR * _NOISE) ** 2
    return torch.from_numpy(rate**steps).float(), np.sqrt(variance)


_PEER = re.compile(r"p\d{5}")


@dataclass
class Account:
    """The account of what all peers have spent and reached."""

    compute_s: float = 0.0
    idle_s: float = 0.0
    syncs_s: list[float] = field(default_factory=list)  # of rounds in which something was exchanged
    rounds: int = 0
    failures: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    # By round and group, the peers that have applied it.
    applied: Counter[tuple[int, tuple[str, ...]]] = field(default_factory=Counter)
    unfinished: int = 0

    def failed(self, reason: str) -> None:
        """Counts a round that was given up, whoever the others were."""
        self.failures += 1
        for part in reason.split("; "):
            self.reasons[_PEER.sub("a peer", part)] += 1


async def _at_once(work: Callable[[], T], /) -> T:
    return work()


class Peer(ABC):
    """One replica, which begins at 0; subclasses hold the rounds. `account` is of all."""

    def __init__(self, swarm: SimulatedSwarm, number: int, account: Account) -> None:
        scenario = swarm.scenario
        self.swarm, self.number, self.me = swarm, number, swarm.names[number]
        self.account, self._rng = account, np.random.default_rng((scenario.seed, number))
        self.local = torch.zeros(VALUES, dtype=torch.float32, device="cpu")
        self.anchor = self.local.clone()
        self.momentum = self.anchor.new_zeros(VALUES)
        self.done = False
        self._steps = scenario.inner_steps
        mean_s = self._steps * scenario.step_s
        mean_s *= scenario.slow_factor if number in swarm.slow else 1.0
        # A sum of steps varies less than each of them.
        self._time = lognormal(mean_s, scenario.step_spread / self._steps**0.5)
        self._chance = Random(f"steps {scenario.seed} {number}")
        self._began_at = 0.0
        self._own, self._tasks = context_of(number), Tasks()
        self._serving = 0
        account.unfinished += 1

    @abstractmethod
    def begin(self) -> None:
        """The inner steps are done: hold a round."""

    @abstractmethod
    def ended(self, result: RoundDone | RoundFailed) -> None:
        """The own round has come to this."""

    @abstractmethod
    def sizes(self) -> tuple[Sizes, Sizes]:
        """Sizes the messages on a stream that this peer opens: its own, and the other's."""

    @abstractmethod
    def on_stream(self, stream: Stream) -> Coroutine[None, None, None]:
        """Serves a stream that another peer has opened."""

    @property
    def now(self) -> float:
        return self.swarm.clock.now

    def later(self, delay_s: float, act: Act) -> None:
        """Does something at this peer, if it lives then."""
        self.swarm.clock.after(delay_s, lambda: self.swarm.clock.act(self.number, act))

    def compute(self) -> None:
        taken_s = self._taken_s()

        def end() -> None:
            self.account.compute_s += taken_s
            self.local = descended(self.local, self._steps, self._rng)
            self._began_at = self.now
            self.begin()

        self.later(taken_s, end)

    def _taken_s(self) -> float:
        return self._chance.lognormvariate(*self._time)

    def waited(self) -> float:
        """Ends the time without computing; returns it, in seconds."""
        waited_s = self.now - self._began_at
        self._began_at = self.now
        self.account.idle_s += waited_s
        return waited_s

    def finish(self) -> None:
        self.done = True
        self.account.unfinished -= 1

    def surroundings(self) -> dict[str, Any]:
        clock = self.swarm.clock.time
        return {
            "me": self.me,
            "run": RUN,
            "detection_s": self.swarm.detection_s(),
            "clock": clock,
            "offload": _at_once,
            "log": lambda event: None,
            "rng": Random(f"checks of {self.me}"),
            "compression": Compression(ExchangeConfig(compression="never")),
            "arrivals": Arrivals(clock),
        }

    def finished(self, result: RoundDone | RoundFailed) -> None:
        self.later(0.0, lambda: self.ended(result))

    def open(self, peer: str, method: str) -> Stream:
        number = int(peer[1:])
        near, far = open_stream(self.swarm.network, self.number, number, self.sizes())
        far.opens = lambda: self.swarm.endpoints[number].serve(far)
        return near

    def suspect(self, peer: str) -> None:  # noqa: B027 (nothing to do)
        """Membership is modelled: it finds out by itself."""

    def serve(self, end: StreamEnd) -> None:
        async def work() -> None:
            self._serving += 1
            try:
                await self.on_stream(end)
                end.returned()
            except TransportError:
                pass
            finally:
                self._serving -= 1

        self.as_own(lambda: setattr(end, "task", self._tasks.spawn(work())))

    def broken(self, stream: SimulatedStream) -> None:
        end = stream.users.get(self.number)
        if isinstance(end, StreamEnd):
            end.broke()

    def as_own(self, act: Act) -> None:
        """Does something whose callbacks belong to this peer."""
        self._own.copy().run(act)

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        self.as_own(lambda: self._tasks.spawn(work))
