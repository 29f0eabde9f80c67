"""Peers find out where others reach them; who cannot be reached is told so."""

from pathlib import Path

import pytest

from protos.addresses import is_loopback, split_address
from tests.support.gate import gate
from tests.support.workers import SMALL, WorkerProcess, settings_of
from worker.addresses import find_host
from worker.errors import ConfigError


def test_peers_that_listen_on_all_addresses_advertise_one_that_others_dial(tmp_path: Path) -> None:
    try:
        find_host("0.0.0.0:0", ())
    except ConfigError:
        pytest.skip("this machine has no address but loopback")
    public = ("--listen", "0.0.0.0:0", "--insecure", "--json")
    held = gate(tmp_path, 25)
    settings = (*SMALL, *settings_of(run__steps=40, diloco__inner_steps=10), *held.settings)
    first = WorkerProcess(
        ["up", "--name", "first", "--min-peers", "2", "--out", str(tmp_path / "first"),
         *public, *settings],
        "first",
    )  # fmt: skip
    second = None
    try:
        there = first.wait_for(lambda e: e["event"] == "listening", "an address")
        host, port = split_address(there["address"])
        assert not is_loopback(host)
        assert port > 0
        assert there["origin"].startswith(("the default route", "the first interface"))
        second = WorkerProcess(
            ["join", there["address"], "--name", "second", "--out", str(tmp_path / "second"),
             *public, *held.settings],
            "second",
        )  # fmt: skip
        here = second.wait_for(lambda e: e["event"] == "listening", "an address")
        assert split_address(here["address"])[0] == host  # one machine, as the other sees it
        assert here["origin"] == f"as {there['address']} sees it"
        with held.opened():
            assert (first.wait(), second.wait()) == (0, 0), first.errors + second.errors
        assert {event["contributors"] for event in first.of("round")} == {2}
    finally:
        for worker in filter(None, (first, second)):
            worker.end()
