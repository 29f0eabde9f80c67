"""Reserved ports."""

import socket

from protos.addresses import ReservedPorts


def test_reserved_ports_are_distinct_and_a_listener_may_take_them() -> None:
    with ReservedPorts(64) as ports:
        assert len(set(ports.addresses)) == 64
        host, _, port = ports.addresses[0].rpartition(":")
        with socket.create_server((host, int(port))) as listener:
            assert listener.getsockname()[1] == int(port)
