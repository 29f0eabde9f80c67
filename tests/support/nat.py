"""A host behind a NAT of its own, in network namespaces: a home router with nftables.

    hub --- router (a member of `Namespaces`, with an address that all reach) --- host

The router masquerades what the host sends, and lets nothing in that does not answer it.
"""

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from murmuration.coordinator.namespaces import NamespaceHost, NoNamespaces

_ROUTER, _HOST = "192.168.77.1", "192.168.77.2"
_RULES = """
table ip nat {
    chain out { type nat hook postrouting priority srcnat; oifname "eth0" masquerade; }
}
table ip filter {
    chain forward {
        type filter hook forward priority filter; policy drop;
        iifname "lan" accept
        ct state established,related accept
    }
    chain input {
        type filter hook input priority filter; policy accept;
        iifname "eth0" ct state new drop
    }
}
"""


def why_no_nat() -> str | None:
    """Why there can be none on this machine; None where there can."""
    return (
        None if shutil.which("nft") else "there is no `nft` (on Debian: apt-get install nftables)"
    )


@contextmanager
def behind_nat(router: NamespaceHost) -> Iterator[NamespaceHost]:
    """The host; its address is one that nobody but the router reaches. Raises NoNamespaces."""
    name = f"{router.name}nat"
    inside = [*router.prefix[:-1], f"{router.prefix[-1]}nat"]
    try:
        _run(["ip", "netns", "add", name])
        _run([*router.prefix, "ip", "link", "add", "lan", "type", "veth", "peer", "name", "eth0",
              "netns", name])  # fmt: skip
        _run([*router.prefix, "ip", "addr", "add", f"{_ROUTER}/24", "dev", "lan"])
        _run([*router.prefix, "ip", "link", "set", "lan", "up"])
        _run([*inside, "ip", "addr", "add", f"{_HOST}/24", "dev", "eth0"])
        _run([*inside, "ip", "link", "set", "lo", "up"])
        _run([*inside, "ip", "link", "set", "eth0", "up"])
        _run([*inside, "ip", "route", "add", "default", "via", _ROUTER])
        _run([*router.prefix, "sysctl", "-qw", "net.ipv4.ip_forward=1"])
        _run([*router.prefix, "nft", "-f", "-"], _RULES)
        yield NamespaceHost(name, _HOST, inside)
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _run(command: Sequence[str], given: str = "") -> None:
    ended = subprocess.run(command, input=given, capture_output=True, text=True)
    if ended.returncode:
        raise NoNamespaces(f"NAT: {' '.join(command)}: {ended.stderr.strip()}")
