"""The links of a swarm on this machine, by whatever means it allows.

Network namespaces limit the rate where they can be made; delay, jitter and broken connections are
the relay's work, and the rate as well where there are no namespaces.
"""

import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from algorithms.link import Link
from coordinator.links.namespaces import Counters, Namespaces, NoNamespaces
from coordinator.links.process import RelayProcess
from protos.addresses import LOOPBACK_HOST, ReservedPorts

_PORT = 7700  # the same for each, since each has an address of its own


@dataclass(frozen=True)
class Place:
    """Where a worker runs.

    Args:
        address: HOST:PORT to listen on.
        prefix: put before its command.
        options: added to its command.
    """

    address: str
    prefix: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


class Network:
    """A context manager: links of workers, up from `start` on, gone afterwards.

    Args:
        links: by worker; None is not shaped.
        means: one of `coordinator.links.MEANS`.
        seed: of jitter and broken connections.
        log_path: of the relay, where there is one.

    Raises:
        NoNamespaces: on entering, when they were asked for and cannot be had.
    """

    host: str  # the address of this machine that workers reach
    means: str  # `namespaces`, `relay` or `namespaces+relay`
    fallback: str | None  # why `auto` made no namespaces

    def __init__(
        self,
        links: Mapping[str, Link | None],
        means: str = "auto",
        *,
        seed: int = 0,
        log_path: Path | None = None,
    ) -> None:
        self._links, self._seed, self._log_path = dict(links), seed, log_path
        self._asked = means
        self._stack = ExitStack()
        self._namespaces: Namespaces | None = None
        self._relay: RelayProcess | None = None
        self._addresses: list[str] = []
        self.host, self.means, self.fallback = LOOPBACK_HOST, "relay", None

    def __enter__(self) -> "Network":
        if self._asked != "relay":
            try:
                self._make_namespaces()
                return self
            except NoNamespaces as reason:
                if self._asked == "namespaces":
                    raise
                self.fallback = str(reason)
        ports = self._stack.enter_context(ReservedPorts(len(self._links)))
        self._addresses = ports.addresses
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def reserve(self) -> str:
        """A free HOST:PORT of this machine that workers reach."""
        reserved = self._stack.enter_context(socket.socket())
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # see ReservedPorts
        reserved.bind((self.host, 0))
        return f"{self.host}:{reserved.getsockname()[1]}"

    def start(self, others: Sequence[str] = ()) -> dict[str, Place]:
        """Starts the relay if one is needed; where each worker is to run.

        Args:
            others: HOST:PORT of whom workers reach besides each other.

        Raises:
            RuntimeError: the relay does not start.
        """
        if "relay" in self.means:
            members = zip(self._addresses, self._links.values(), strict=True)
            self._relay = self._stack.enter_context(
                RelayProcess(
                    dict(zip(self._links, members, strict=True)),
                    host=self.host,
                    others=others,
                    seed=self._seed,
                    limit_rate=self._namespaces is None,
                    log_path=self._log_path,
                )
            )
        return {name: self._place(index, name) for index, name in enumerate(self._links)}

    def traffic(self) -> dict[str, Counters]:
        """What has passed each worker's link: Ethernet frames in namespaces, else TCP payload.

        Raises:
            RuntimeError: it cannot be told any more.
        """
        if self._namespaces is not None:
            return dict(zip(self._links, self._namespaces.counters(), strict=True))
        return self._relay.counters() if self._relay is not None else {}

    # --------------------------------------------------------------------------------- inside

    def _make_namespaces(self) -> None:
        links = list(self._links.values())
        made = self._stack.enter_context(Namespaces(len(links), links))
        self._namespaces, self.host = made, made.host_address
        self._addresses = [f"{member.address}:{_PORT}" for member in made.members]
        more = any(link and (link.delay_s or link.loss) for link in links)
        self.means = "namespaces+relay" if more else "namespaces"

    def _place(self, index: int, name: str) -> Place:
        options = ("--proxy", self._relay.proxies[name]) if self._relay else ()
        if self._namespaces is None:
            return Place(self._addresses[index], (), options)
        prefix = tuple(self._namespaces.members[index].prefix)
        return Place(self._addresses[index], prefix, ("--insecure", *options))
