"""Which host a peer advertises where none was given."""

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from murmuration.protos.addresses import with_port
from murmuration.worker.errors import ConfigError
from murmuration.worker.node import own_address
from murmuration.worker.node.own_address import FoundHost, find_host, neighbours_dial, source_host

W1 = "w1.example:7700"
ELSEWHERE, ELSEWHERE_V6 = own_address._ELSEWHERE
TWO = ["10.0.0.5", "192.0.2.5"]
PUBLIC_V4, PUBLIC_V6, OWN_V6 = "8.8.4.4", "2600::5", "fd00::5"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes a machine: which of its addresses lead to HOST:PORT, and what its interfaces have."""

    def has(routes: Mapping[str, str], interfaces: Sequence[str] = TWO) -> None:
        known = {"127.0.0.1:7700": "127.0.0.1", **routes}
        monkeypatch.setattr(own_address, "source_host", known.get)
        monkeypatch.setattr(own_address, "_interface_hosts", lambda: iter(interfaces))

    return has


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "10.0.0.5:7700", "w0.example:7700"])
def test_an_address_of_its_own_is_advertised_as_it_is(machine, listen):
    machine({})
    assert find_host(listen, ["127.0.0.1:7700"]) is None


@pytest.mark.parametrize(
    ("routes", "contacts", "seen_from", "host", "origin"),
    [
        ({}, [W1], "203.0.113.9", "203.0.113.9", f"as {W1} sees it"),
        ({W1: "10.0.0.5"}, [W1], "", "10.0.0.5", f"the way to {W1}"),
        ({W1: "10.0.0.5"}, [W1], "10.0.0.5", "10.0.0.5", f"as {W1} sees it"),
        ({ELSEWHERE: "192.0.2.5"}, ["127.0.0.1:7700"], "127.0.0.1", "192.0.2.5",
         "the default route; it also has 10.0.0.5"),
        ({}, [], "", "10.0.0.5",
         "the first interface, there is no default route; it also has 192.0.2.5"),
    ],
    ids=["as others see it", "the way to them", "both", "default route", "interface"],
)  # fmt: skip
@pytest.mark.parametrize("listen", ["0.0.0.0:7700", "[::]:0"])
def test_in_the_place_of_a_wildcard_an_address_is_found(
    machine, routes, contacts, seen_from,
    host, origin, listen,
):  # fmt: skip
    machine(routes)
    assert find_host(listen, contacts, seen_from) == FoundHost(host, origin)


def test_behind_nat_neighbours_are_told_where_they_dial_it(machine):
    machine({W1: "10.0.0.5", ELSEWHERE: "10.0.0.5"})
    found = find_host("0.0.0.0:7700", [W1], "203.0.113.9")
    assert found is not None
    assert with_port(found.advertised, "0.0.0.0:7700") == "203.0.113.9:7700,10.0.0.5:7700"
    dialled = {"0.0.0.0:7700": "10.0.0.5:7700", "10.0.0.5:1": "10.0.0.5:1", "127.0.0.1:1": ""}
    assert {bound: neighbours_dial(bound) for bound in dialled} == dialled


@pytest.mark.parametrize(
    ("listen", "routes", "interfaces", "seen_from", "host"),
    [
        ("[::]:7700", {}, [PUBLIC_V6], "", PUBLIC_V6),
        ("[::]:7700", {}, ["fe80::5", PUBLIC_V6], "", PUBLIC_V6),
        ("[::]:7700", {}, ["10.0.0.5", PUBLIC_V6], "", PUBLIC_V6),
        ("[::]:7700", {}, ["10.0.0.5", OWN_V6], "", "10.0.0.5"),
        ("[::]:7700", {}, [OWN_V6], "", OWN_V6),
        ("[::]:7700", {ELSEWHERE_V6: PUBLIC_V6}, [], "", PUBLIC_V6),
        ("[::]:7700", {ELSEWHERE: "10.0.0.5", ELSEWHERE_V6: PUBLIC_V6}, [], "", PUBLIC_V6),
        ("[::]:7700", {ELSEWHERE: PUBLIC_V4, ELSEWHERE_V6: PUBLIC_V6}, [], "", PUBLIC_V4),
        ("[::]:7700", {ELSEWHERE: "10.0.0.5", ELSEWHERE_V6: OWN_V6}, [], "", "10.0.0.5"),
        ("[::]:7700", {"a:1": PUBLIC_V6}, ["10.0.0.5"], "", PUBLIC_V6),
        ("[::]:7700", {}, ["10.0.0.5"], PUBLIC_V6, PUBLIC_V6),
        ("[::]:7700", {}, ["10.0.0.5"], "::1", "10.0.0.5"),
        ("0.0.0.0:7700", {}, ["10.0.0.5", PUBLIC_V6], "", "10.0.0.5"),
        ("0.0.0.0:7700", {ELSEWHERE_V6: PUBLIC_V6}, ["10.0.0.5"], PUBLIC_V6, "10.0.0.5"),
        ("0.0.0.0:7700", {"a:1": PUBLIC_V6}, ["10.0.0.5"], "", "10.0.0.5"),
    ],
)
def test_all_addresses_of_a_machine_are_those_of_ipv6_too(
    machine, listen, routes, interfaces,
    seen_from, host,
):  # fmt: skip
    machine(routes, interfaces)
    found = find_host(listen, ["a:1"], seen_from)
    assert found is not None
    assert found.host == host


@pytest.mark.parametrize("hosts", [(), (PUBLIC_V6,)], ids=["none", "only IPv6"])
def test_a_machine_without_an_address_for_0_0_0_0_is_one_line(machine, hosts):
    machine({ELSEWHERE_V6: hosts[0]} if hosts else {}, hosts)
    with pytest.raises(ConfigError, match=r"no address that others could dial; say with "):
        find_host("0.0.0.0:7700", ())


def test_loopback_is_not_advertised_to_another_machine(machine):
    machine({"192.0.2.9:7700": "192.0.2.5"})
    with pytest.raises(ConfigError, match=r"--listen 127.0.0.1:0: .* 192.0.2.9:7700 is another"):
        find_host("127.0.0.1:0", ["127.0.0.1:7700", "192.0.2.9:7700"])


def test_of_a_link_of_two_this_machines_end_is_taken(monkeypatch):
    attributes, routes = {"IFA_ADDRESS": "10.8.0.1", "IFA_LOCAL": "10.8.0.6"}, MagicMock()
    routes.__enter__().get_addr.return_value = [SimpleNamespace(get_attr=attributes.get)]
    monkeypatch.setattr("pyroute2.IPRoute", lambda: routes)
    monkeypatch.setattr(own_address.sys, "platform", "linux")
    assert {*own_address._interface_hosts()} == {"10.8.0.6"}


def test_the_way_to_loopback_is_loopback():
    assert source_host("127.0.0.1:7700") == "127.0.0.1"
    assert source_host("[::1]:0") in ("::1", None)  # None: a machine without IPv6
