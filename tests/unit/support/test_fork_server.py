"""What is forked can be ended at once, as what `Popen` starts with a group of its own."""

import os
import socket

import pytest

from tests.support import fork_server


def test_a_pid_is_told_once_its_group_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    told, telling = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    told.setblocking(False)

    def leads_a_group(*_: int) -> None:
        with pytest.raises(BlockingIOError):
            told.recv(32)
        order.append("group")

    order: list[str] = []
    monkeypatch.setattr(os, "setpgid", leads_a_group)
    with told, telling:
        fork_server._tell_pid(telling)
        assert int(told.recv(32)) == os.getpid()
    assert order == ["group"]
