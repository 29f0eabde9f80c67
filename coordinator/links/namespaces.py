"""Members of a test network: each in a network namespace of its own, behind a link of its own.

    host --- hub (a bridge in a namespace of its own) --- one veth pair per member

Each direction of a member's link is shaped by a token bucket (`tbf`): what it sends at its own end
of the pair, what it receives at the hub's. The bridge has a namespace of its own too, so that the
host's packet filter (Docker's, say) has no word in it. Needs Linux, root (CAP_NET_ADMIN and
CAP_SYS_ADMIN), and `ip` and `tc` from iproute2; independent of what runs in the namespaces.
"""

import fcntl
import ipaddress
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from algorithms.link import Link

_BURST_S = 0.005  # of the rate: what a bucket may send at once after a pause
_LEAST_BURST_BYTES = 3_200  # two full packets
_QUEUE_S = 0.1  # of the rate: packets that wait, as in a home router
_LEAST_QUEUE_BYTES = 48_000
_COMMAND_S = 20.0
_serial = itertools.count()


class NoNamespaces(RuntimeError):
    """This machine or user cannot make shaped network namespaces; says why in one line."""


@dataclass(frozen=True)
class Counters:
    """What one member has sent and received, whole Ethernet frames, as the hub's end counted it."""

    sent_bytes: int
    received_bytes: int


@dataclass(frozen=True)
class NamespaceHost:
    """One namespace.

    Args:
        name: of the namespace, as `ip netns` knows it.
        address: the member's IPv4 address, reached by the host and all members.
        prefix: put before a command, runs it there. It replaces itself: same pid, same signals.
    """

    name: str
    address: str
    prefix: list[str] = field(compare=False)


class Namespaces:
    """A context manager: made on entering, gone on leaving. Use from one thread.

    Processes in the namespaces are the caller's to end before. What a killed process has left
    behind is removed by the next one that enters.

    Args:
        count: members.
        links: one link for all, or one per member; None is not shaped. Only the rate counts here;
            delay and the rest need the relay.

    Raises:
        NoNamespaces: on entering; nothing is left behind then.
        ValueError: as many links as members are needed.
    """

    host_address: str
    members: list[NamespaceHost]

    def __init__(self, count: int, links: Link | Sequence[Link | None] | None) -> None:
        each = list(links) if isinstance(links, Sequence) else [links] * count
        if len(each) != count:
            raise ValueError(f"{count} members, but {len(each)} links")
        if not 1 <= count <= MOST_MEMBERS:
            raise ValueError(f"{count} members; one network takes 1 to {MOST_MEMBERS}")
        self._links = each
        self._stem, self._host_end = names(next(_serial))
        self._hub = f"{self._stem}-hub"
        self.members = []

    def __enter__(self) -> "Namespaces":
        problem = _lacking()
        if problem:
            raise NoNamespaces(problem)
        try:
            with _alone():
                _remove_leftovers()
                self._make_hub()
            for index, link in enumerate(self._links):
                self._make_member(index, link)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()

    def counters(self) -> list[Counters]:
        """Of each member, in order, since entering."""
        told = json.loads(_run("ip", "-n", self._hub, "-json", "-stats", "link", "show"))
        statistics = {each["ifname"]: each["stats64"] for each in told}
        return [
            # What the hub's end receives, the member has sent.
            Counters(statistics[f"m{i}"]["rx"]["bytes"], statistics[f"m{i}"]["tx"]["bytes"])
            for i in range(len(self._links))
        ]

    # --------------------------------------------------------------------------------- inside

    def _make_hub(self) -> None:
        """The bridge, and the host's way to it. Alone, lest two choose the same subnet."""
        subnet = free_subnet(json.loads(_run("ip", "-json", "-4", "route", "show", "table", "all")))
        if subnet is None:
            raise NoNamespaces("no subnet is free: routes cover all that may be used")
        self._subnet = subnet
        host = subnet[1]
        self.host_address = str(host)
        hub = self._hub
        _run("ip", "netns", "add", hub)
        _run("ip", "-n", hub, "link", "add", "bridge", "type", "bridge", "forward_delay", "0")
        _run("ip", "-n", hub, "link", "set", "bridge", "up")
        end = ("name", "host", "netns", hub)
        _run("ip", "link", "add", self._host_end, "type", "veth", "peer", *end)
        _run("ip", "-n", hub, "link", "set", "host", "master", "bridge", "up")
        _run("ip", "address", "add", f"{host}/{subnet.prefixlen}", "dev", self._host_end)
        _run("ip", "link", "set", self._host_end, "up")

    def _make_member(self, index: int, link: Link | None) -> None:
        name, address = f"{self._stem}-m{index}", self._subnet[2 + index]
        port = f"m{index}"
        _run("ip", "netns", "add", name)
        self.members.append(NamespaceHost(name, str(address), [_tool("ip"), "netns", "exec", name]))
        _run("ip", "-n", name, "link", "set", "lo", "up")
        end = ("name", "eth0", "netns", name)
        _run("ip", "-n", self._hub, "link", "add", port, "type", "veth", "peer", *end)
        _run("ip", "-n", self._hub, "link", "set", port, "master", "bridge", "up")
        _run(
            "ip", "-n", name, "address", "add", f"{address}/{self._subnet.prefixlen}", "dev", "eth0"
        )
        _run("ip", "-n", name, "link", "set", "eth0", "up")
        _run("ip", "-n", name, "route", "add", "default", "via", self.host_address)
        if link is not None:
            _shape(name, "eth0", link)
            _shape(self._hub, port, link)

    def _remove(self) -> None:
        """All that was made, in an order that leaves the host's routes clean at once."""
        _remove_interface(self._host_end)
        for name in (*(member.name for member in self.members), self._hub):
            _remove_namespace(name)


def why_not() -> str | None:
    """Why namespaces cannot be made here, in one line; None when they can. Tries it."""
    try:
        with Namespaces(1, Link(rate_mbps=1)):
            return None
    except NoNamespaces as reason:
        return str(reason)


def _shape(namespace: str, interface: str, link: Link) -> None:
    rate_bytes_s = link.rate_mbps * 1e6 / 8
    burst = max(_LEAST_BURST_BYTES, round(rate_bytes_s * _BURST_S))
    queue = burst + max(_LEAST_QUEUE_BYTES, round(rate_bytes_s * _QUEUE_S))
    rate = f"{round(link.rate_mbps * 1e6)}bit"
    words = ("rate", rate, "burst", str(burst), "limit", str(queue))
    _run("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", "tbf", *words)


def _lacking() -> str | None:
    if not sys.platform.startswith("linux"):
        return "network namespaces need Linux"
    for tool in ("ip", "tc"):
        if shutil.which(tool, path=_path()) is None:
            return f"there is no `{tool}` (on Debian: apt-get install iproute2)"
    return None


def _path() -> str:
    """Where iproute2 may be, though a user's PATH often leaves it out."""
    return os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))


def _tool(name: str) -> str:
    return shutil.which(name, path=_path()) or name


def _run(tool: str, *words: str) -> str:
    """Raises NoNamespaces."""
    try:
        done = subprocess.run(
            [_tool(tool), *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_COMMAND_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoNamespaces(f"`{tool}` does not run: {error}") from error
    if done.returncode != 0:
        said = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
        hint = "" if os.geteuid() == 0 else " (this needs root)"
        raise NoNamespaces(f"`{tool} {' '.join(words)}`: {said}{hint}")
    return done.stdout


def _remove_interface(name: str) -> None:
    if Path("/sys/class/net", name).exists():
        with suppress(NoNamespaces):
            _run("ip", "link", "delete", name)


def _remove_namespace(name: str) -> None:
    with suppress(NoNamespaces):
        _run("ip", "netns", "delete", name)


def _remove_leftovers() -> None:
    folder = Path("/run/netns")
    found = [each.name for each in folder.iterdir()] if folder.is_dir() else []
    for namespace, interface in leftovers(found):
        _remove_interface(interface)
        _remove_namespace(namespace)


@contextmanager
def _alone() -> Iterator[None]:
    """One process at a time chooses a subnet and tidies up."""
    path = Path(tempfile.gettempdir()) / f"murmur-links-{os.geteuid()}.lock"
    try:
        with path.open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise NoNamespaces(f"{path}: {error}") from error


Subnet = ipaddress.IPv4Network

_NAME = "murmur"
# Set aside for measurements (RFC 2544), so seldom taken; then private ones.
_CANDIDATES = (Subnet("198.18.0.0/15"), Subnet("10.192.0.0/10"), Subnet("172.28.0.0/14"))
_PREFIX = 24
MOST_MEMBERS = 2 ** (32 - _PREFIX) - 4  # network, broadcast, host; the last is kept free


def free_subnet(routes: Iterable[Mapping[str, Any]]) -> Subnet | None:
    """A /24 that overlaps no route (as `ip -json route` tells them); None when all are taken."""
    taken = []
    for route in routes:
        destination = str(route.get("dst", ""))
        try:
            network = Subnet(destination, strict=False)
        except ValueError:  # "default", and what is no IPv4
            continue
        if network.prefixlen > 1:  # those are default routes cut in halves
            taken.append(network)
    for subnet in _subnets():
        if not any(subnet.overlaps(other) for other in taken):
            return subnet
    return None


def _subnets() -> Iterator[Subnet]:
    for candidate in _CANDIDATES:
        yield from candidate.subnets(new_prefix=_PREFIX)


def names(serial: int) -> tuple[str, str]:
    """(stem of namespace names, name of the host's interface): of this process, for its n-th use.

    The stem carries when the process was started, since a pid alone comes again.
    """
    pid = os.getpid()
    return f"{_NAME}-{pid}-{started(pid)}-{serial}", f"mm{pid}-{serial}"


def leftovers(namespaces: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(namespace, the host's interface) of those whose process is gone."""
    for name in namespaces:
        parts = name.split("-")
        if len(parts) != 5 or parts[0] != _NAME or not all(map(str.isdecimal, parts[1:4])):
            continue
        if started(int(parts[1])) != int(parts[2]):
            yield name, f"mm{parts[1]}-{parts[3]}"


def started(pid: int) -> int | None:
    """When a process was started, in clock ticks since the machine was; None when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[19])
