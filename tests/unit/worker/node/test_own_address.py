"""Which host a peer advertises where none was given."""

from collections.abc import Mapping

import pytest

from murmuration.worker.errors import ConfigError
from murmuration.worker.node import own_address
from murmuration.worker.node.own_address import FoundHost, find_host, source_host

ELSEWHERE, ELSEWHERE_V6 = own_address._ELSEWHERE
PUBLIC_V4, PUBLIC_V6, OWN_V6 = "8.8.4.4", "2600::5", "fd00::5"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Which address of a machine leads to HOST:PORT; it has two, and `ELSEWHERE` is the default
    route's."""
    routes: dict[str, str] = {"127.0.0.1:7700": "127.0.0.1"}
    monkeypatch.setattr(own_address, "source_host", routes.get)
    monkeypatch.setattr(own_address, "_interface_hosts", lambda: iter(["10.0.0.5", "192.0.2.5"]))
    return routes


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "10.0.0.5:7700", "w0.example:7700"])
def test_an_address_of_its_own_is_advertised_as_it_is(
    machine: Mapping[str, str], listen: str
) -> None:
    assert find_host(listen, ["127.0.0.1:7700"]) is None


@pytest.mark.parametrize(
    ("routes", "contacts", "seen_from", "found"),
    [
        ({}, ["w1.example:7700"], "203.0.113.9", ("203.0.113.9", "as w1.example:7700 sees it")),
        (
            {"w1.example:7700": "10.0.0.5"},
            ["w1.example:7700"],
            "",
            ("10.0.0.5", "the way to w1.example:7700"),
        ),
        (
            {ELSEWHERE: "192.0.2.5"},
            ["127.0.0.1:7700"],
            "127.0.0.1",
            ("192.0.2.5", "the default route; it also has 10.0.0.5"),
        ),
        (
            {},
            [],
            "",
            ("10.0.0.5", "the first interface, there is no default route; it also has 192.0.2.5"),
        ),
    ],
    ids=["as others see it", "the way to them", "default route", "interface"],
)
@pytest.mark.parametrize("listen", ["0.0.0.0:7700", "[::]:0"])
def test_in_the_place_of_a_wildcard_an_address_is_found(
    machine: dict[str, str],
    routes: Mapping[str, str],
    contacts: list[str],
    seen_from: str,
    found: tuple[str, str],
    listen: str,
) -> None:
    machine.update(routes)
    assert find_host(listen, contacts, seen_from) == FoundHost(*found)


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
    monkeypatch: pytest.MonkeyPatch,
    listen: str,
    routes: dict[str, str],
    interfaces: list[str],
    seen_from: str,
    host: str,
) -> None:
    monkeypatch.setattr(own_address, "source_host", routes.get)
    monkeypatch.setattr(own_address, "_interface_hosts", lambda: iter(interfaces))
    found = find_host(listen, ["a:1"], seen_from)
    assert found is not None
    assert found.host == host


@pytest.mark.parametrize("hosts", [(), (PUBLIC_V6,)], ids=["none", "only IPv6"])
def test_a_machine_without_an_address_for_0_0_0_0_is_one_line(
    monkeypatch: pytest.MonkeyPatch, hosts: tuple[str, ...]
) -> None:
    routes = {ELSEWHERE_V6: hosts[0]} if hosts else {}
    monkeypatch.setattr(own_address, "source_host", routes.get)
    monkeypatch.setattr(own_address, "_interface_hosts", lambda: iter(hosts))
    with pytest.raises(ConfigError, match=r"no address that others could dial; say with "):
        find_host("0.0.0.0:7700", ())


def test_loopback_is_not_advertised_to_another_machine(machine: dict[str, str]) -> None:
    machine["192.0.2.9:7700"] = "192.0.2.5"
    with pytest.raises(ConfigError, match=r"--listen 127.0.0.1:0: .* 192.0.2.9:7700 is another"):
        find_host("127.0.0.1:0", ["127.0.0.1:7700", "192.0.2.9:7700"])


def test_the_way_to_loopback_is_loopback() -> None:
    assert source_host("127.0.0.1:7700") == "127.0.0.1"
    assert source_host("[::1]:0") in ("::1", None)  # None: a machine without IPv6
