"""Peers find out where others reach them; who cannot be reached is told so."""

import json
import re
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from murmuration.protos.addresses import is_loopback, split_address
from murmuration.worker.cli.doctor import doctor
from murmuration.worker.errors import ConfigError
from murmuration.worker.manifest import PROTOCOL
from murmuration.worker.node import admission
from murmuration.worker.node.own_address import find_host
from tests.support.gates import gate
from tests.support.workers import (
    ENDLESS,
    PACED,
    QUICK,
    SMALL,
    WorkerProcess,
    free_addresses,
    running_swarm,
    settings_of,
)


def test_peers_that_listen_on_all_addresses_advertise_one_that_others_dial(tmp_path):
    try:
        find_host("0.0.0.0:0", ())
    except ConfigError:
        pytest.skip("this machine has no address but loopback")
    public = ("--listen", "0.0.0.0:0", "--insecure", "--json")
    held = gate(tmp_path, 13)
    settings = (*SMALL, *settings_of(run__steps=20, diloco__inner_steps=5), *held.settings)
    with ExitStack() as up:

        def started(name: str, *words: str) -> tuple[WorkerProcess, dict[str, Any]]:
            own = ("--name", name, "--out", str(tmp_path / name), *public)
            worker = up.enter_context(WorkerProcess([*words, *own], name))
            return worker, worker.wait_for(lambda e: e["event"] == "listening", "an address")

        first, there = started("first", "up", "--min-peers", "2", *settings)
        host, port = split_address(there["address"])
        assert not is_loopback(host)
        assert port > 0
        assert there["origin"].startswith(("the default route", "the first interface"))
        second, here = started("second", "join", there["address"], *held.settings)
        assert split_address(here["address"])[0] == host  # one machine, as the other sees it
        assert here["origin"] == f"as {there['address']} sees it"
        with held.opened():
            assert (first.wait(), second.wait()) == (0, 0), first.errors + second.errors
        assert {event["contributors"] for event in first.of("round")} == {2}


def test_after_a_power_cut_the_joiner_may_start_first(tmp_path):
    """As at the beginning, with the same commands: it tries until the first is there."""
    first, second = free_addresses(2)
    shared = ("--min-peers", "2", "--json", *ENDLESS, *QUICK, "--set", "checkpoint.every_s=0.1")
    commands = {
        "second": ["join", first, "--listen", second, "--json", *PACED[:2], *QUICK],
        "first": ["up", "--listen", first, *shared],
    }
    workers: dict[str, WorkerProcess] = {}
    with ExitStack() as up:
        for _ in range(2):
            for name, command in commands.items():
                out = ("--name", name, "--out", str(tmp_path / name))
                workers[name] = up.enter_context(WorkerProcess([*command, *out], name))
                if name == "second":  # until it has called there, where nobody answers
                    with socket.create_server(split_address(first)) as listener:
                        listener.accept()[0].close()
            for worker in workers.values():
                worker.wait_for(lambda e: e["event"] == "round" and e["contributors"] == 2, "round")
            workers["first"].wait_for(lambda e: e["event"] == "checkpoint", "a checkpoint")
            for worker in workers.values():
                worker.end()
        assert workers["first"].of("resumed")


def findings(out: Path, *args: str) -> dict[str, tuple[bool, str]]:
    """(whether it is well, what was found) by what was looked at; the rest of the machine's state
    is left out, for it is none of a test's."""
    result = CliRunner().invoke(doctor, [*args, "--out", str(out), "--json"], standalone_mode=False)
    found = json.loads(result.output)
    assert result.return_value == (0 if all(each["ok"] for each in found) else 1)
    assert all(each["ok"] or each["fix"] for each in found)
    machine = ("open files", "disk", "memory", "device")
    return {
        each["about"]: (each["ok"], each["found"]) for each in found if each["about"] not in machine
    }


def test_the_doctor_says_who_dials_it(tmp_path, monkeypatch):
    here, (nowhere,) = ("--listen", "127.0.0.1:0", *PACED[:2]), free_addresses(1)
    with running_swarm(1, tmp_path, *ENDLESS) as swarm:
        swarm.start("w0").wait_for(lambda e: e["event"] == "started", "start")
        address = swarm.addresses["w0"]
        found = findings(tmp_path, address, *here)
        looked_at = ["the peer", "version", "the run", "clock", "address", "reached", "the way"]
        assert list(found) == looked_at
        assert all(ok for ok, _ in found.values()), found
        assert found["reached"][1].startswith(f"{address} dials 127.0.0.1:")
        assert re.fullmatch(r"round trip \d+\.\d ms, \d+\.\d Mbit/s to there", found["the way"][1])
        found = findings(tmp_path, address, *here, "--advertise", nowhere)
        assert found["reached"] == (False, f"{address} cannot dial {nowhere}")
        found = findings(tmp_path, address, "--listen", address, *PACED[:2])
        assert not found["address"][0]
        assert "cannot listen on" in found["address"][1]
        assert found["the way"][0]
        found = findings(tmp_path / "w0", address, *here)
        assert found["folder"] == (False, f"--out {tmp_path / 'w0'}: another worker writes there")
        found = findings(tmp_path, address, *here, "--inner-steps", "33")
        assert not found["the run"][0]
        assert "diloco.inner_steps: 33 here, 2 there" in found["the run"][1]
        monkeypatch.setattr(admission, "PROTOCOL", PROTOCOL + 1)
        found = findings(tmp_path, address, *here)
        assert found["version"] == (
            False,
            f"{address} speaks protocol {PROTOCOL}, and this version speaks {PROTOCOL + 1}",
        )
    found = findings(tmp_path, nowhere, *here)
    assert list(found) == ["the peer", "address"]
    assert not found["the peer"][0]
    assert nowhere in found["the peer"][1]
