"""What a node is made of: the protocols of its components, its settings, the process around it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random, SystemRandom
from typing import Protocol

from murmuration.worker.background import Component, Offload
from murmuration.worker.catchup.bootstrap import JoinConfig
from murmuration.worker.exchange.allreduce.mean import Residuals
from murmuration.worker.leases import Ledger
from murmuration.worker.node.admission import Credentials
from murmuration.worker.pipeline.context import StageCounts
from murmuration.worker.relay.router_port import UpnpRouter
from murmuration.worker.training.mailbox import Begin
from murmuration.worker.views import PagePlace


class Rounds(Component, Protocol):
    """This peer's own part in rounds."""

    async def begin(self, begin: Begin) -> None:
        """Starts a round; it ends with a RoundDone or RoundFailed."""
        ...

    def give_up(self, fragment: int, reason: str) -> None:
        """Ends the fragment's round on its way, if there is one, as failed."""
        ...


@dataclass(frozen=True, kw_only=True)
class NodeConfig(JoinConfig):
    """Args:
    peer: this peer's name.
    listen, proxy: `HOST:PORT` to serve, and of an HTTP CONNECT proxy to reach others by.
    advertise: the address others reach it at, with port 0 for the bound one; None for all of that.
    advertise_origin: how it was found where nobody gave it, for the user.
    coordinator: address, or None.
    metrics: HOST:PORT to serve Prometheus at, or None.
    page: where to serve the page of the swarm, or None.
    stage: which part of the model this peer serves.
    stage_counts: they go on where a peer moves to another stage.
    activation_shape: (B, T, D) of the largest microbatch; None where the task does not say.
    ledger: samples that are used already, from a checkpoint.
    residuals: what this peer's reductions have left out, from a checkpoint.
    relayed: whether it may be reached through relays, where others cannot dial it.
    relay_mbps: the rate at which it relays for others; 0: for nobody.
    epoch: tells this process from earlier ones of the peer; None for the ms from 1970 to its start.
    """

    peer: str
    listen: str = "127.0.0.1:0"
    proxy: str | None = None
    advertise: str | None = None
    advertise_origin: str = ""
    coordinator: str | None = None
    metrics: str | None = None
    page: PagePlace | None = None
    stage: int = 0
    stage_counts: StageCounts = field(default_factory=StageCounts)
    activation_shape: tuple[int, int, int] | None = None
    ledger: Ledger = field(default_factory=Ledger)
    residuals: Residuals = field(default_factory=Residuals)
    relayed: bool = True
    relay_mbps: float = 100.0
    epoch: int | None = None


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The process around a node.

    Args:
        offload: where heavy work runs.
        log: takes events as plain values.
        clock: monotonic seconds.
        credentials: what this peer proves itself and signs by, and where it is kept.
        rng: draws what others must not know before.
        router: that the machine is behind.
    """

    offload: Offload
    log: Callable[[dict[str, object]], None]
    clock: Callable[[], float] = time.monotonic
    credentials: Credentials = field(default_factory=Credentials)
    rng: Random = field(default_factory=SystemRandom)
    router: UpnpRouter = field(default_factory=UpnpRouter)
