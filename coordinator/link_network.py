"""The links of a swarm on this machine, by whatever means it allows.

Network namespaces limit the rate where they can be made; delay, jitter and broken connections are
the relay's work, and the rate as well where there are no namespaces.
"""

import json
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from murmuration.algorithms.link import Link, parse_link
from murmuration.coordinator.namespaces import Counters, Namespaces, NoNamespaces
from murmuration.protos.addresses import LOOPBACK_HOST, ReservedPorts

_NAMED = re.compile(r"(w\d+)=(.*)", re.DOTALL)


def parse_links(texts: Sequence[str], workers: int) -> dict[str, Link | None]:
    """The link of each worker, `w0`, `w1`, ...: its own, else the one without a name, else None.

    Args:
        texts: `20mbit,delay=50ms` for all others, `w0=5mbit` for one worker.

    Raises:
        ValueError: what is wrong, and how to write it.
    """
    names = [f"w{index}" for index in range(workers)]
    own: dict[str, Link] = {}
    common: Link | None = None
    for text in texts:
        named = _NAMED.fullmatch(text.strip())
        if named is None:
            if common is not None:
                raise ValueError(
                    f"link {text!r}: a second one for all; name a worker, as w0={text}"
                )
            common = parse_link(text)
            continue
        name, rest = named.groups()
        if name not in names:
            raise ValueError(f"link {text!r}: there is no {name}; workers are w0 to {names[-1]}")
        if name in own:
            raise ValueError(f"link {text!r}: a second one for {name}; leave one out")
        own[name] = parse_link(rest)
    return {name: own.get(name, common) for name in names}


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


class LinkNetwork:
    """A context manager: links of workers, up from `start` on, gone afterwards.

    Args:
        links: by worker; None is not shaped.
        means: one of `auto`, `namespaces` and `relay`.
        seed: of jitter and broken connections.
        log_path: of the relay, where there is one.

    Raises:
        NoNamespaces: on entering, when `means` says so and they cannot be had.
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
        self._means = means
        self._stack = ExitStack()
        self._namespaces: Namespaces | None = None
        self._relay: RelayProcess | None = None
        self._addresses: list[str] = []
        self.host, self.means, self.fallback = LOOPBACK_HOST, "relay", None

    def __enter__(self) -> "LinkNetwork":
        if self._means != "relay":
            try:
                self._make_namespaces()
                return self
            except NoNamespaces as reason:
                if self._means == "namespaces":
                    raise
                self.fallback = str(reason)
        ports = self._stack.enter_context(ReservedPorts(len(self._links)))
        self._addresses = ports.addresses
        return self

    def __exit__(self, *_: object) -> None:
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
            RuntimeError: it is not known any more.
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
        return Place(self._addresses[index], prefix, options)


_END_S = 5.0


class RelayProcess:
    """A running relay; ends with this process, however that one ends. Use from one thread.

    Args:
        members: (HOST:PORT that it listens on, its link or None) of each worker, by name.
        host: the address the proxies listen on, port free.
        others: HOST:PORT of whom workers may reach besides each other.
        seed: of jitter and of connections that break.
        limit_rate: False where something else limits the rate already.
        log_path: takes what the relay writes to stderr.

    Raises:
        RuntimeError: it did not start.
    """

    proxies: dict[str, str]  # HOST:PORT for each worker's `--proxy`, by name

    def __init__(
        self,
        members: Mapping[str, tuple[str, Link | None]],
        *,
        host: str = LOOPBACK_HOST,
        others: Sequence[str] = (),
        seed: int = 0,
        limit_rate: bool = True,
        log_path: Path | None = None,
    ) -> None:
        log = log_path.open("w") if log_path else None
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "murmuration.coordinator.shaping_proxy"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # the terminal's Ctrl-C is for the workers to save
            )
        finally:
            if log is not None:
                log.close()
        described = {
            name: (address, asdict(link) if link else None)
            for name, (address, link) in members.items()
        }
        options = {"host": host, "seed": seed, "limit_rate": limit_rate}
        try:
            self.proxies = self._ask(
                json.dumps({**options, "members": described, "others": list(others)})
            )
        except BaseException:
            self.close()
            raise

    def cut(self, *names: str) -> None:
        """Between two workers, or of one from all others; connections stand still, none ends.

        Raises:
            ValueError: no such worker.
        """
        self._command("cut", *names)

    def heal(self) -> None:
        """All links pass again."""
        self._command("heal")

    def counters(self) -> dict[str, Counters]:
        """What each worker has sent and received over the relay: TCP payload."""
        return {name: Counters(*counts) for name, counts in self._command("counters").items()}

    def broken(self) -> int:
        """How many connections have been broken so far."""
        return int(self._command("broken")["broken"])

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """Ends it; connections over it break."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> "RelayProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _command(self, *words: str) -> dict[str, Any]:
        answer = self._ask(" ".join(words))
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer

    def _ask(self, line: str) -> dict[str, Any]:
        """Raises RuntimeError: it has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(OSError):
            print(line, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the relay has ended with exit code {self._process.wait()}")
        document: dict[str, Any] = json.loads(answer)
        return document
