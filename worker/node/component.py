"""What a node is made of: its settings, and the process around it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random, SystemRandom

from murmuration.protos.events import Log
from murmuration.worker.background import Offload
from murmuration.worker.catchup.bootstrap import JoinConfig
from murmuration.worker.exchange.allreduce.mean import Residuals
from murmuration.worker.leases import Ledger
from murmuration.worker.node.admission import Credentials
from murmuration.worker.pipeline.context import StageCounts
from murmuration.worker.relay.router_port import UpnpRouter
from murmuration.worker.views import PagePlace


@dataclass(frozen=True, kw_only=True)
class NodeConfig(JoinConfig):
    """Args: advertise: the address that others dial, with port 0 for the bound one;
    advertise_origin: how it was found where nobody gave it, for the user; proxy: of HTTP CONNECT;
    stage_counts: go on where the stage moves; activation_shape: (B, T, D) of the largest
    microbatch; None where the task does not say; ledger: samples that are used already; residuals:
    what this peer's reductions have left out; relayed: whether it may be reached through relays;
    epoch: tells this process from earlier ones of the peer; None for the ms from 1970 to its
    start."""

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
    """The process around a node. Args: offload: where heavy work runs; rng: draws what others must
    not know before; router: that the machine is behind."""

    offload: Offload
    log: Log
    clock: Callable[[], float] = time.monotonic
    credentials: Credentials = field(default_factory=Credentials)
    rng: Random = field(default_factory=SystemRandom)
    router: UpnpRouter = field(default_factory=UpnpRouter)
