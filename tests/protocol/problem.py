"""A problem to train without a model: every peer is pulled towards a point of its own."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from murmuration.algorithms.fragments import Fragment, TensorSpec
from murmuration.algorithms.plan import Plan
from murmuration.worker.config import Config, RunConfig
from murmuration.worker.exchange.measured import ExchangeConfig
from murmuration.worker.exchange.round_context import RoundConfig
from murmuration.worker.manifest import Manifest
from murmuration.worker.membership.swim import MembershipConfig
from tests.support import specification


@dataclass(frozen=True)
class Problem:
    """The problem and the settings that all peers of a run share.

    Args:
        layers: number of values of each layer; a fragment holds one or more of them.
        steps: of the run.
        exchange: whether payloads are compressed; `auto` would depend on the real clock.
        far: how much further away a peer's point is, by peer; 1 where none is given.
        step_s: virtual seconds that an inner step takes, by peer; 0.1 where none is given; may be
            changed on the way."""

    layers: tuple[int, ...] = (300,)
    steps: int = 12
    plan: Plan = field(default_factory=lambda: Plan(inner_steps=3))
    rounds: RoundConfig = field(default_factory=RoundConfig)
    membership: MembershipConfig = field(default_factory=MembershipConfig)
    exchange: ExchangeConfig = field(default_factory=lambda: ExchangeConfig(compression="never"))
    far: Mapping[str, float] = field(default_factory=dict)
    step_s: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0

    @property
    def config(self) -> Config:
        return Config(
            run=RunConfig(seed=self.seed, steps=self.steps),
            plan=self.plan,
            rounds=self.rounds,
            membership=self.membership,
            exchange=self.exchange,
        )

    @property
    def schema(self) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(f"layers.{i}.w", (n,)) for i, n in enumerate(self.layers))

    @property
    def fragments(self) -> tuple[Fragment, ...]:
        return self.plan.cut(self.schema)

    @property
    def manifest(self) -> Manifest:
        """Keeps one protocol, so that a seed draws what it drew when it found a fault."""
        return Manifest({**Manifest.of(self.config, self.schema).document, "protocol": 10})

    @property
    def encoded_bytes(self) -> int:
        return 4 * sum(self.layers)

    def reference(
        self,
        peers: Sequence[str],
        early_starts: specification.AnchorPrefetch = specification.at_once,
    ) -> dict[str, list[specification.Outer]]:
        """The outer states that these peers must end with, when all are in every round."""
        replicas, run = {peer: Synthetic(self, peer) for peer in peers}, self.manifest.run
        return specification.ReferenceRun(
            self.plan, self.fragments, replicas, self.steps, run, early_starts
        ).train()


class Synthetic:
    """One peer's parameters and its gradients; deterministic in (seed, peer, steps taken).

    After the inner step `poison_at` its parameters hold a NaN; after `moves_until` steps of its own
    all its gradients are 0."""

    accessor = None  # its parameters are all here
    model = torch.nn.Module()  # it has no buffers
    moments_are_finite = True
    samples = tokens_per_sample = None  # it draws none
    learning_rate = last_gradient_norm = None  # it has no optimizer

    def __init__(
        self, problem: Problem, peer: str, computes: Callable[[float], None] = lambda _: None
    ) -> None:
        shared, own = _generator(problem.seed, "start"), _generator(problem.seed, peer)
        self._parameters = {
            spec.name: torch.randn(spec.shape, generator=shared) for spec in problem.schema
        }
        self._targets = {
            spec.name: torch.randn(spec.shape, generator=own) * problem.far.get(peer, 1.0)
            for spec in problem.schema
        }
        self._computes, self._step_s, self._peer = computes, problem.step_s, peer
        self._taken, self.loss = 0, math.nan
        self.poison_at: int | None = None
        self.moves_until = math.inf

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        return self._parameters

    def backward(self, step: int) -> Mapping[str, Tensor]:
        self._computes(self._step_s.get(self._peer, 0.1))
        self._taken += 1
        scale = 0.05 * (1 + 0.5 * math.sin(self._taken))
        if self._taken > self.moves_until:
            scale = 0.0
        self.loss = scale
        return {
            name: (value - self._targets[name]).mul_(scale)
            for name, value in self._parameters.items()
        }

    def reset_moments(self) -> None:
        """There are none."""

    def inner_step(self, step: int, gradients: Mapping[str, Tensor]) -> None:
        for name, value in self._parameters.items():
            value.sub_(gradients[name])
        if step == self.poison_at:
            next(iter(self._parameters.values()))[0] = math.nan


def _generator(seed: int, name: str) -> torch.Generator:
    return torch.Generator().manual_seed(random.Random(f"{seed}/{name}").getrandbits(63))


def steady(steps: int, seed: int = 0, inner_steps: int = 5) -> Problem:
    """Half a second a step: long enough for faults that last a minute."""
    return Problem(
        steps=steps,
        plan=Plan(inner_steps=inner_steps),
        step_s=dict.fromkeys("abcdexyz", 0.5),
        seed=seed,
    )
