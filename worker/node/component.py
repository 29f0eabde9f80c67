"""The parts that a node is made of: its settings, and the process around it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random, SystemRandom

from murmuration.protos.events import Log
from murmuration.worker.background import Offload
from murmuration.worker.exchange.allreduce.mean import Residuals
from murmuration.worker.identity.authority import Credentials
from murmuration.worker.leases import Ledger
from murmuration.worker.node.own_address import Addresses
from murmuration.worker.pipeline.context import StageCounts
from murmuration.worker.relay.router_port import UpnpRouter
from murmuration.worker.views import PagePlace


@dataclass(frozen=True, kw_only=True)
class NodeConfig(Addresses):
    """The settings of a node; addresses are HOST:PORT."""

    peer: str
    joins: tuple[str, ...] = ()  # to try, again and again until the run starts
    remembered: tuple[str, ...] = ()  # likewise, of a former life: anybody may answer there
    min_peers: int | None = 1  # to be ready before the start; None leaves that to the others
    wait_s: float = 120.0  # how long to wait for them
    proxy: str | None = None  # of HTTP CONNECT
    coordinator: str | None = None
    metrics: str | None = None
    page: PagePlace | None = None
    stage: int = 0
    stage_counts: StageCounts = field(default_factory=StageCounts)  # go on where the stage moves
    # (B, T, D) of the largest microbatch; None where the task does not say.
    activation_shape: tuple[int, int, int] | None = None
    ledger: Ledger = field(default_factory=Ledger)  # samples that are used already
    # What this peer's reductions have left out.
    residuals: Residuals = field(default_factory=Residuals)
    # Tells this process from earlier ones of the peer; None for the ms from 1970 to its start.
    start_ms: int | None = None


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The process around a node."""

    offload: Offload  # where heavy work runs
    log: Log
    clock: Callable[[], float] = time.monotonic  # seconds
    credentials: Credentials = field(default_factory=Credentials)
    rng: Random = field(default_factory=SystemRandom)  # draws what others must not know before
    router: UpnpRouter = field(default_factory=UpnpRouter)  # that the machine is behind
