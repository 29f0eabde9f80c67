"""HOST:PORT of peers and of those that call, and reserved ports."""

import socket

import pytest

from murmuration.protos.addresses import (
    ReservedPorts,
    caller_host,
    is_wildcard,
    join_address,
    split_address,
    with_host,
)


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ("9464", "127.0.0.1:9464"),
        ("0", "127.0.0.1:0"),
        ("0.0.0.0:9464", "0.0.0.0:9464"),
        ("[::1]:9464", "[::1]:9464"),
        ("one.example:9464", "one.example:9464"),
    ],
)
def test_a_port_alone_is_one_of_loopback(given: str, address: str) -> None:
    assert with_host(given) == address


@pytest.mark.parametrize("given", ["", "one.example", ":9464", "65536", "²"])
def test_what_is_neither_address_nor_port_is_refused(given: str) -> None:
    with pytest.raises(ValueError, match="is no HOST:PORT"):
        with_host(given)


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:192.0.2.7:41000", "192.0.2.7"),
        ("ipv6:%5B2001:db8::7%5D:41000", "2001:db8::7"),
        ("ipv6:[::ffff:192.0.2.7]:41000", "192.0.2.7"),
        ("unix:/tmp/socket", ""),
        ("ipv4:nonsense", ""),
        ("w0", ""),
    ],
)
def test_the_host_of_a_caller(peer: str, host: str) -> None:
    assert caller_host(peer) == host


@pytest.mark.parametrize("address", ["192.0.2.7:7700", "[2001:db8::7]:7700", "w0.example:1"])
def test_an_address_is_joined_as_it_was_split(address: str) -> None:
    assert join_address(*split_address(address)) == address


@pytest.mark.parametrize(
    ("host", "wildcard"),
    [("0.0.0.0", True), ("::", True), ("127.0.0.1", False), ("w0.example", False)],
)
def test_a_wildcard_stands_for_all_addresses(host: str, wildcard: bool) -> None:
    assert is_wildcard(host) == wildcard


def test_reserved_ports_are_distinct_and_a_listener_may_take_them() -> None:
    with ReservedPorts(64) as ports:
        assert len(set(ports.addresses)) == 64
        host, _, port = ports.addresses[0].rpartition(":")
        with socket.create_server((host, int(port))) as listener:
            assert listener.getsockname()[1] == int(port)
