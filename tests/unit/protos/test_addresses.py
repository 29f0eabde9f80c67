"""HOST:PORT of peers and of those that call."""

import pytest

from murmuration.protos.addresses import caller_host, is_wildcard, served_at
from murmuration.protos.exit_codes import UsageError


def test_a_port_alone_is_one_of_loopback():
    assert served_at("", None) is None
    assert [served_at("", port) for port in ("9464", 0)] == ["127.0.0.1:9464", "127.0.0.1:0"]
    for whole in ("0.0.0.0:9464", "[::1]:9464", "one.example:9464"):
        assert served_at("", whole) == whole


@pytest.mark.parametrize("given", ["", "one.example", ":9464", "65536", "²"])
def test_what_is_neither_address_nor_port_is_refused(given):
    with pytest.raises(UsageError, match=r"^--web: write a port of this machine"):
        served_at("--web", given)


def test_the_host_of_a_caller():
    hosts = {
        "ipv4:192.0.2.7:41000": "192.0.2.7",
        "ipv6:%5B2001:db8::7%5D:41000": "2001:db8::7",
        "ipv6:[::ffff:192.0.2.7]:41000": "192.0.2.7",
        **dict.fromkeys(("unix:/tmp/socket", "ipv4:nonsense", "w0"), ""),
    }
    assert {peer: caller_host(peer) for peer in hosts} == hosts


def test_a_wildcard_stands_for_all_addresses():
    hosts = ("0.0.0.0", "::", "127.0.0.1", "w0.example")
    assert [is_wildcard(host) for host in hosts] == [True, True, False, False]
