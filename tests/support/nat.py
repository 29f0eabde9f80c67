"""A host behind a NAT of its own, in network namespaces: a home router with nftables.

    hub --- router (a member of `Namespaces`, with an address that all reach) --- host

The router masquerades what the host sends, and lets nothing in that does not answer it. A real
miniupnpd on it opens ports for whom is behind it.
"""

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.namespaces import NamespaceHost, ran

_ROUTER, HOST = "192.168.77.1", "192.168.77.2"
_PUBLIC = "9.9.9.9"  # of the router too: miniupnpd serves no network of private addresses
_UPNP = """
ext_ifname=eth0
ext_ip=9.9.9.9
listening_ip=lan
enable_upnp=yes
upnp_table_name=upnp
upnp_nat_table_name=upnp
upnp_forward_chain=forward
upnp_nat_chain=prerouting
upnp_nat_postrouting_chain=postrouting
uuid=00000000-0000-0000-0000-000000000001
allow 1024-65535 0.0.0.0/0 1024-65535
"""
_RULES = """
table inet upnp {
    chain forward { }
    chain prerouting { type nat hook prerouting priority dstnat; }
    chain postrouting { type nat hook postrouting priority srcnat - 1; }
}
table ip nat {
    chain out { type nat hook postrouting priority srcnat; oifname "eth0" masquerade; }
}
table ip filter {
    chain forward {
        type filter hook forward priority filter; policy drop;
        iifname "lan" accept
        ct status dnat accept
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
    missing = [f"`{name}`" for name in ("nft", "miniupnpd") if shutil.which(name) is None]
    return (
        f"there is no {' nor '.join(missing)} (on Debian: apt-get install nftables miniupnpd)"
        if missing
        else None
    )


@contextmanager
def behind_nat(router: NamespaceHost) -> Iterator[NamespaceHost]:
    """The host; its address is one that nobody but the router reaches. Raises NoNamespaces."""
    name, inside = f"{router.name}nat", [*router.prefix[:-1], f"{router.prefix[-1]}nat"]
    try:
        ran("ip", "netns", "add", name)
        veth = ["ip", "link", "add", "lan", "type", "veth", "peer", "name", "eth0", "netns"]
        ran(*router.prefix, *veth, name)
        ran(*router.prefix, "ip", "addr", "add", f"{_ROUTER}/24", "dev", "lan")
        ran(*router.prefix, "ip", "link", "set", "lan", "up")
        ran(*inside, "ip", "addr", "add", f"{HOST}/24", "dev", "eth0")
        ran(*inside, "ip", "link", "set", "lo", "up")
        ran(*inside, "ip", "link", "set", "eth0", "up")
        ran(*inside, "ip", "route", "add", "default", "via", _ROUTER)
        ran(*router.prefix, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        ran(*router.prefix, "nft", "-f", "-", given=_RULES)
        yield NamespaceHost(name, HOST, inside)
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@contextmanager
def upnp(router: NamespaceHost, others: Sequence[NamespaceHost], folder: Path) -> Iterator[str]:
    """A miniupnpd on the router of `behind_nat`; yields the address that the others reach it at."""
    ran(*router.prefix, "ip", "addr", "add", f"{_PUBLIC}/32", "dev", "eth0")
    for other in others:
        ran(*other.prefix, "ip", "route", "add", f"{_PUBLIC}/32", "via", router.address)
    (folder / "miniupnpd.conf").write_text(_UPNP)
    command = ["miniupnpd", "-d", "-f", str(folder / "miniupnpd.conf"), "-P", str(folder / "pid")]
    with (folder / "miniupnpd.log").open("w") as log:
        daemon = subprocess.Popen([*router.prefix, *command], stdout=log, stderr=log)
        try:
            yield _PUBLIC
        finally:
            daemon.terminate()
            daemon.wait()
