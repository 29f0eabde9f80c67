"""Members of a test network: each in a network namespace of its own, behind a link of its own.

    host --- hub (a bridge in a namespace of its own) --- one veth pair per member

Each direction of a member's link is shaped by a token bucket (`tbf`): what it sends at its own end
of the pair, what it receives at the hub's. The bridge has a namespace of its own too, so that the
host's packet filter (Docker's, say) has no word in it. Needs Linux, root (CAP_NET_ADMIN and
CAP_SYS_ADMIN) and `nsenter` from util-linux; independent of what runs in the namespaces.
"""

import ipaddress
import itertools
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from socket import AF_INET
from typing import TYPE_CHECKING

from filelock import FileLock

from deploy.shape import shape
from murmuration.algorithms.link import Link

if TYPE_CHECKING:
    from pyroute2 import IPRoute, NetNS

_FOLDER = Path("/run/netns")
_NEEDED = 1 << 12 | 1 << 21  # CAP_NET_ADMIN, CAP_SYS_ADMIN
_serial = itertools.count()


class NoNamespaces(RuntimeError):
    """This machine or user cannot make shaped network namespaces; says why in one line."""


@dataclass(frozen=True)
class NamespaceHost:
    """One namespace.

    Args:
        name: of the namespace, in /run/netns.
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
            with _explained("network namespaces"):
                with FileLock(_lock_path()):  # one process at a time chooses a subnet
                    _remove_leftovers()
                    self._make_hub()
                for index, link in enumerate(self._links):
                    self._make_member(index, link)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def counters(self) -> list[dict[str, int]]:
        """Bytes that each member has sent and received, in order, since entering."""
        with _explained("counters of links"), _opened(self._hub) as hub:
            found = {link.get_attr("IFLA_IFNAME"): link for link in hub.get_links()}
        statistics = [found[f"m{i}"].get_attr("IFLA_STATS64") for i in range(len(self._links))]
        # What the hub's end receives, the member has sent.
        return [
            {"sent_bytes": each["rx_bytes"], "received_bytes": each["tx_bytes"]}
            for each in statistics
        ]

    # --------------------------------------------------------------------------------- inside

    def _make_hub(self) -> None:
        """The bridge, and the host's way to it. Alone, lest two choose the same subnet."""
        from pyroute2 import IPRoute, netns

        with IPRoute() as host:
            subnet = free_subnet(
                f"{route.get_attr('RTA_DST')}/{route['dst_len']}"
                for route in host.get_routes(family=AF_INET)
            )
            if subnet is None:
                raise NoNamespaces("no subnet is free: routes cover all that may be used")
            self._subnet = subnet
            self.host_address = str(subnet[1])
            with _signals_held():
                netns.create(self._hub)
            with _opened(self._hub) as hub:
                hub.link("add", ifname="bridge", kind="bridge", br_forward_delay=0)
                hub.link("set", index=_index(hub, "bridge"), state="up")
                end = {"ifname": "host", "net_ns_fd": self._hub}
                host.link("add", ifname=self._host_end, kind="veth", peer=end)
                _join_bridge(hub, "host")
            index = _index(host, self._host_end)
            host.addr("add", index=index, address=self.host_address, prefixlen=subnet.prefixlen)
            host.link("set", index=index, state="up")

    def _make_member(self, index: int, link: Link | None) -> None:
        from pyroute2 import netns

        name, address = f"{self._stem}-m{index}", str(self._subnet[2 + index])
        port = f"m{index}"
        with _signals_held():
            netns.create(name)
        prefix = [_nsenter(), f"--net={_FOLDER / name}"]
        self.members.append(NamespaceHost(name, address, prefix))
        with _opened(self._hub) as hub, _opened(name) as own:
            end = {"ifname": "eth0", "net_ns_fd": name}
            hub.link("add", ifname=port, kind="veth", peer=end)
            _join_bridge(hub, port)
            own.link("set", index=_index(own, "lo"), state="up")
            eth0 = _index(own, "eth0")
            own.addr("add", index=eth0, address=address, prefixlen=self._subnet.prefixlen)
            own.link("set", index=eth0, state="up")
            own.route("add", dst="default", gateway=self.host_address)
            if link is not None:
                shape(own, _index(own, "eth0"), link)
                shape(hub, _index(hub, port), link)

    def _remove(self) -> None:
        """All that was made, in an order that leaves the host's routes clean at once."""
        _remove_interface(self._host_end)
        for name in (*(member.name for member in self.members), self._hub):
            _remove_namespace(name)


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Raises NoNamespaces: what was tried, and why it cannot be had."""
    from pyroute2.netlink.exceptions import NetlinkError

    try:
        yield
    except (NetlinkError, OSError) as error:
        code, *details = error.args
        words = dict.fromkeys([what, *map(str, details), os.strerror(code)])
        raise NoNamespaces(": ".join(words)) from error


@contextmanager
def _opened(name: str) -> Iterator["NetNS"]:
    from pyroute2 import NetNS

    with _signals_held(), NetNS(name, flags=0) as namespace:
        yield namespace


@contextmanager
def _signals_held() -> Iterator[None]:
    """While pyroute2 forks: it ends its children by SIGTERM. A handler of this process that raises
    would unwind the copy of the stack there, and so remove the namespaces that are being made."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _index(namespace: "NetNS | IPRoute", interface: str) -> int:
    index: int = namespace.link_lookup(ifname=interface)[0]
    return index


def _join_bridge(hub: "NetNS", port: str) -> None:
    hub.link("set", index=_index(hub, port), master=_index(hub, "bridge"), state="up")


def _lacking() -> str | None:
    if not sys.platform.startswith("linux"):
        return "network namespaces need Linux"
    if _capabilities() & _NEEDED != _NEEDED:
        return "network namespaces need root (CAP_NET_ADMIN and CAP_SYS_ADMIN)"
    if shutil.which(_nsenter()) is None:
        return "there is no `nsenter` (on Debian: apt-get install util-linux)"
    return None


def _capabilities() -> int:
    """Of this process, a bit for each."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["CapEff"], 16)


def _nsenter() -> str:
    """Where it may be, though a user's PATH often leaves that out."""
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
    return shutil.which("nsenter", path=path) or "nsenter"


def _lock_path() -> Path:
    return Path(tempfile.gettempdir()) / f"murmur-links-{os.geteuid()}.lock"


def _remove_interface(name: str) -> None:
    from pyroute2 import IPRoute

    with suppress(NoNamespaces), _explained(name), IPRoute() as host:
        for index in host.link_lookup(ifname=name):
            host.link("del", index=index)


def _remove_namespace(name: str) -> None:
    from pyroute2 import netns

    with suppress(FileNotFoundError):
        netns.remove(name)


def _remove_leftovers() -> None:
    found = [each.name for each in _FOLDER.iterdir()] if _FOLDER.is_dir() else []
    for namespace, interface in leftovers(found):
        _remove_interface(interface)
        _remove_namespace(namespace)


Subnet = ipaddress.IPv4Network

_NAME = "murmur"
# Set aside for measurements (RFC 2544), so seldom taken; then private ones.
_CANDIDATES = (Subnet("198.18.0.0/15"), Subnet("10.192.0.0/10"), Subnet("172.28.0.0/14"))
_PREFIX = 24
MOST_MEMBERS = 2 ** (32 - _PREFIX) - 4  # network, broadcast, host; the last is kept free


def free_subnet(routes: Iterable[str]) -> Subnet | None:
    """A /24 that overlaps no route; None when all are taken. Args: routes: their destinations."""
    taken = []
    for destination in routes:
        try:
            network = Subnet(destination, strict=False)
        except ValueError:  # the default's is none
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


def why_not() -> str | None:
    """Why namespaces cannot be made here, in one line; None when they can. Tries it."""
    try:
        with Namespaces(1, Link(rate_mbps=1)):
            return None
    except NoNamespaces as reason:
        return str(reason)
