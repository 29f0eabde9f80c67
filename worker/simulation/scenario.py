"""A simulated run as it is asked for, and what goes wrong in it, written down or drawn from a seed.
Peers are numbers, times are in seconds of the virtual clock."""

import math
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Literal

from murmuration.algorithms.codecs import codec_by_name
from murmuration.algorithms.link import Link
from murmuration.algorithms.plan import Merge

Preset = Literal["diloco", "noloco"]

_MOST_PEERS = 10_000
_MOST_PEERS_OF_A_MEAN = 128


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One simulated run. Raises ValueError: a value out of range, with the reason."""

    preset: Preset = "noloco"  # rounds in pairs; or `diloco`, the leaderless mean of all
    peers: int = 16
    rounds: int = 20  # outer rounds of every peer
    inner_steps: int = 50  # H
    step_s: float = 0.1  # mean time of an inner step
    step_spread: float = 0.0  # its standard deviation over the mean
    # Of every peer; its loss is the streams that each link breaks per minute of their life.
    link: Link = field(default_factory=lambda: Link(rate_mbps=20.0, delay_s=0.05))
    # Standard deviation of a message's delay over its mean, lognormal; 0: always the mean, or
    # within the link's jitter.
    latency_spread: float = 0.0
    slow_factor: float = 1.0  # how much longer slow peers take for a step
    slow_share: float = 0.0  # of the peers that are slow
    # From when to when (s) the swarm is cut into two halves.
    partition: tuple[float, float] | None = None
    crash_share: float = 0.0  # of the peers that die, each at a random time
    freeze_share: float = 0.0  # of the peers that stand still once
    freeze_s: float = 0.0  # for how long they do
    group_size: int = 2  # of `noloco`; 2 is a pair
    params: int = 1_000_000  # values that are exchanged; only their bytes count
    codec: str = "fp32"  # wire codec of pseudo-gradients and of their means; anchors travel as fp32
    merge: Merge = "reset"  # of `diloco`; with `keep` replicas keep what the codec leaves out
    seed: int = 0

    def __post_init__(self) -> None:
        if not 2 <= self.peers <= _MOST_PEERS:
            raise ValueError(f"peers is {self.peers:,}; 2 to {_MOST_PEERS:,} can be simulated")
        if self.preset == "diloco" and self.peers > _MOST_PEERS_OF_A_MEAN:
            raise ValueError(
                f"{self.peers:,} peers of diloco: all send to all, which is {self.peers**2:,} "
                f"streams a round; at most {_MOST_PEERS_OF_A_MEAN} peers can be simulated, or use "
                "noloco"
            )
        for name in ("rounds", "inner_steps", "params"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        codec_by_name(self.codec)
        if self.merge not in ("reset", "keep"):
            raise ValueError(f"merge is {self.merge!r}; use one of reset, keep")
        if self.merge == "keep" and self.preset != "diloco":
            raise ValueError('merge = "keep" is for means over all; use the preset diloco')
        if not 2 <= self.group_size <= 16:
            raise ValueError(f"group size {self.group_size}; it must be 2 (a pair) to 16")
        if not 0 < self.step_s < math.inf:
            raise ValueError(f"a step of {self.step_s:g} s; it must be above 0")
        for name in ("step_spread", "latency_spread", "freeze_s"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise ValueError(f"{name} is {value:g}; it must be at least 0")
        for name in ("slow_share", "crash_share", "freeze_share"):
            if not 0 <= (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} is {value:g}; it must be 0 to 1, below 1")
        if not 1 <= self.slow_factor < math.inf:
            raise ValueError(f"stragglers {self.slow_factor:g} times slower; it must be at least 1")
        if self.latency_spread and not self.link.delay_s:
            raise ValueError("a latency spread needs a link with a delay, such as delay=50ms")
        if self.latency_spread and self.link.jitter_s:
            raise ValueError("a latency spread and the link's jitter exclude each other")
        if self.partition and not 0 <= self.partition[0] < self.partition[1] < math.inf:
            begin, end = self.partition
            raise ValueError(
                f"a partition from {begin:g} s to {end:g} s; it must end after it began"
            )


STALL_S = 10.0  # until a stream over which nothing comes is given up, as by keepalive


@dataclass(frozen=True)
class Crash:
    """A process ends for good, and its connections with it."""

    peer: int
    at_s: float


@dataclass(frozen=True)
class Freeze:
    """A process stands still, and then handles all that has come meanwhile."""

    peer: int
    at_s: float
    for_s: float


@dataclass(frozen=True)
class Partition:
    """Nothing passes between these peers and the others."""

    half: frozenset[int]
    from_s: float
    to_s: float


Fault = Crash | Freeze | Partition
FaultPlan = tuple[Fault, ...]


def last_s(plan: FaultPlan) -> float:
    """When the last fault is over; a crash is over at once."""
    partitions_s = [fault.to_s for fault in plan if isinstance(fault, Partition)]
    freezes_s = [fault.at_s + fault.for_s for fault in plan if isinstance(fault, Freeze)]
    crashes_s = [fault.at_s for fault in plan if isinstance(fault, Crash)]
    return max((*partitions_s, *freezes_s, *crashes_s), default=0.0)


def scenario_faults(scenario: Scenario, half: frozenset[int], chance: Random) -> FaultPlan:
    """The crashes, freezes and the partition that a scenario asks for, at random times."""
    horizon_s = scenario.rounds * scenario.inner_steps * scenario.step_s
    count, at_s = scenario.peers, partial(chance.uniform, 0, horizon_s)
    order, crashes = chance.sample(range(count), count), round(count * scenario.crash_share)
    freezing = order[crashes : crashes + round(count * scenario.freeze_share)]
    return (
        *[Crash(peer, at_s()) for peer in order[:crashes]],
        *[Freeze(peer, at_s(), scenario.freeze_s) for peer in freezing],
        *([Partition(half, *scenario.partition)] if scenario.partition else ()),
    )
