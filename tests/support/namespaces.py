"""Members of a test network: each in a network namespace of its own, behind a link of its own.

    host --- hub (a bridge in a namespace of its own) --- one veth pair per member

Each direction of a member's link is shaped by a token bucket (`tbf`). The bridge has a namespace of
its own, out of reach of the host's packet filter. Needs root, `ip`, `tc` and `nsenter`.
"""

import itertools
import json
import os
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from deploy.shape import bucket
from murmuration.algorithms.link import Link

_FOLDER = Path("/run/netns")
_NAME = "murmur"
_NETS = 256  # 198.18.N.0/24: set aside for measurements (RFC 2544), so seldom taken
_serial = itertools.count()


class NoNamespaces(RuntimeError):
    """This machine or user cannot make shaped network namespaces; says why in one line."""


@dataclass(frozen=True)
class NamespaceHost:
    """One namespace.

    Args:
        name: of the namespace, in /run/netns.
        address: the member's IPv4 address, reached by the host and all members.
        prefix: put before a command, runs it there. It replaces itself: same pid, same signals."""

    name: str
    address: str
    prefix: list[str] = field(compare=False)


class Namespaces:
    """A context manager: made on entering, gone on leaving.

    Processes in the namespaces are the caller's to end before. What a killed process has left
    behind is removed by the next one that enters.

    Args:
        count: members, 1 to 252.
        link: of each; None is not shaped. Only the rate counts here; delay and the rest need the
            relay.

    Raises:
        NoNamespaces: on entering; nothing is left behind then."""

    host_address: str

    def __init__(self, count: int, link: Link | None) -> None:
        self._count, self._link, serial = count, link, next(_serial)
        self._stem, self._host_end = f"{_NAME}-{os.getpid()}-{serial}", f"mm{os.getpid()}-{serial}"
        self._hub = f"{self._stem}-hub"
        self.members: list[NamespaceHost] = []

    def __enter__(self) -> "Namespaces":
        if os.geteuid() != 0 or None in map(shutil.which, ("ip", "tc", "nsenter")):
            raise NoNamespaces("network namespaces need root, `ip`, `tc` and `nsenter`")
        _remove_leftovers()
        try:
            self._make_hub()
            for index in range(self._count):
                self._make_member(index)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def counters(self) -> list[dict[str, int]]:
        """Bytes that each member has sent and received, in order, since entering."""
        found = json.loads(ran("ip", "-j", "-s", "-n", self._hub, "link"))
        told = {each["ifname"]: each["stats64"] for each in found}
        statistics = [told[f"m{i}"] for i in range(self._count)]
        # What the hub's end receives, the member has sent.
        each_way = (("sent_bytes", "rx"), ("received_bytes", "tx"))
        return [{what: each[way]["bytes"] for what, way in each_way} for each in statistics]

    def shape(self, index: int, link: Link) -> None:
        """Shapes both directions of a member's link, from now on."""
        rate, burst, limit = map(str, bucket(link))
        queue = ("tbf", "rate", f"{rate}bps", "burst", burst, "limit", limit)
        for namespace, device in ((self.members[index].name, "eth0"), (self._hub, f"m{index}")):
            ran("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *queue)

    def switch(self, index: int, state: str) -> None:
        """Takes a member's link `down`, or `up` again."""
        ran("ip", "-n", self._hub, "link", "set", f"m{index}", state)

    def _make_hub(self) -> None:
        """The bridge, and the host's way to it."""
        routes, first = ran("ip", "route"), os.getpid()
        nets = (f"198.18.{(first + n) % _NETS}." for n in range(_NETS))
        self._net = next((net for net in nets if net not in routes), None)
        if self._net is None:
            raise NoNamespaces("no subnet is free: routes cover all that may be used")
        self.host_address, hub, end = f"{self._net}1", self._hub, self._host_end
        ran("ip", "netns", "add", hub)
        ran("ip", "-n", hub, *["link", "add", "bridge", "type", "bridge", "forward_delay", "0"])
        ran("ip", "-n", hub, "link", "set", "bridge", "up")
        ran("ip", "link", "add", end, "type", "veth", "peer", "name", "host", "netns", hub)
        ran("ip", "-n", hub, "link", "set", "host", "master", "bridge", "up")
        ran("ip", "addr", "add", f"{self.host_address}/24", "dev", end)
        ran("ip", "link", "set", end, "up")

    def _make_member(self, index: int) -> None:
        name, address, port = f"{self._stem}-m{index}", f"{self._net}{2 + index}", f"m{index}"
        ran("ip", "netns", "add", name)
        prefix = [shutil.which("nsenter") or "nsenter", f"--net={_FOLDER / name}"]
        self.members.append(NamespaceHost(name, address, prefix))
        hub = ("ip", "-n", self._hub, "link")
        ran(*hub, "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
        ran(*hub, "set", port, "master", "bridge", "up")
        ran("ip", "-n", name, "link", "set", "lo", "up")
        ran("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
        ran("ip", "-n", name, "link", "set", "eth0", "up")
        ran("ip", "-n", name, "route", "add", "default", "via", self.host_address)
        if self._link:
            self.shape(index, self._link)

    def _remove(self) -> None:
        """All that was made, in an order that leaves the host's routes clean at once."""
        with suppress(NoNamespaces):
            ran("ip", "link", "del", self._host_end)
        for name in (*(member.name for member in self.members), self._hub):
            _remove_namespace(name)


def ran(*command: str, given: str = "") -> str:
    """Runs a command; returns what it prints. Raises NoNamespaces: it fails."""
    ended = subprocess.run(command, input=given, capture_output=True, text=True)
    if ended.returncode:
        raise NoNamespaces(f"{' '.join(command)}: {ended.stderr.strip()}")
    return ended.stdout


def _remove_namespace(name: str) -> None:
    with suppress(NoNamespaces):
        ran("ip", "netns", "del", name)


def _remove_leftovers() -> None:
    for path in _FOLDER.glob(f"{_NAME}-*"):
        _, pid, *_ = path.name.split("-")
        if not Path(f"/proc/{pid}").exists():
            _remove_namespace(path.name)


def why_not() -> str | None:
    """Why namespaces cannot be made here, in one line; None when they can. Tries it."""
    try:
        with Namespaces(1, Link(rate_mbps=1)):
            return None
    except NoNamespaces as reason:
        return str(reason)
