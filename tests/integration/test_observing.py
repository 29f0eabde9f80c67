"""Observes real workers while they train, and in the end."""

import json
import signal
import subprocess
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from murmuration.coordinator.asking import ask
from tests.support.fork_server import MURMUR, ForkedPopen
from tests.support.workers import (
    ENDLESS,
    PACED,
    QUICK,
    free_addresses,
    looked,
    printed,
    report_of,
    running_swarm,
    settings_of,
)


def scraped(url: str) -> dict[tuple[str, ...], float]:
    """(name, values of the labels by name, but the peer's) -> value: a worker's own metrics."""
    with urlopen(url) as answer:
        text = answer.read().decode()
    return {
        (
            sample.name,
            *(value for key, value in sample.labels.items() if key != "peer"),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("murmuration_")
    }


def at(document: Any, path: list[str]) -> float:
    """The number there in a status document."""
    for key in path:
        document = document[key]
    return float(document)


def test_metrics_are_the_numbers_of_the_status(tmp_path):
    with running_swarm(2, tmp_path, *ENDLESS) as swarm:
        w0 = swarm.start("w0", "--metrics", "0")
        swarm.start("w1")
        url = w0.wait_for(lambda e: e["event"] == "metrics", "address of its metrics")["url"]
        assert url.startswith("http://127.0.0.1:")
        w0.wait_for_round(3)
        # Counters only grow: a scrape between two questions lies between their answers.
        before = ask(swarm.addresses["w0"])
        found = scraped(url)
        after = ask(swarm.addresses["w0"])

        for name, *path in (
            (("murmuration_tokens_total",), "tokens"),
            (("murmuration_rounds_total", "completed"), "rounds", "completed"),
            (("murmuration_payload_bytes_total", "sent"), "traffic", "payload_bytes_sent"),
            (
                ("murmuration_bytes_total", "sent", "Exchange", "data"),
                "traffic", "sent_by_method", "Data/Exchange",
            ),
        ):  # fmt: skip
            assert at(before, path) <= found[name] <= at(after, path), name
        assert found["murmuration_rounds_total", "completed"] >= 3
        assert found["murmuration_round_seconds_sum",] > 0
        assert found["murmuration_members", "alive"] == 2
        assert found["murmuration_learning_rate",] > 0
        w0.send(signal.SIGTERM)
        assert w0.wait() == 0
        with pytest.raises(URLError):
            urlopen(url)


def test_a_launcher_serves_the_page_of_its_encrypted_swarm(tmp_path):
    (address,) = free_addresses(1)
    command = [*MURMUR, "swarm", "--workers", "2"]
    command += [*ENDLESS, "--out", str(tmp_path / "run"), "--web", address]
    with ForkedPopen(command, stdout=subprocess.PIPE, text=True) as swarm:
        assert swarm.stdout is not None
        try:
            line = next(line for line in swarm.stdout if "the page of the swarm" in line)
            assert line.endswith(f": http://{address}/\n")
            told = looked(
                lambda: json.loads(urlopen(f"http://{address}/api/swarm").read()),
                lambda told: [row["answers"] for row in told["peers"]] == [True, True],
            )
            assert [row["peer"] for row in told["peers"]] == ["w0", "w1"]
            assert told["swarm"]["encrypted"] is True
        finally:
            swarm.send_signal(signal.SIGINT)
            swarm.communicate()
    assert swarm.returncode == 130


RUN = settings_of(run__steps=100, diloco__inner_steps=10)


def test_every_peer_ends_with_the_report_of_all_and_names_the_dead(tmp_path):
    with running_swarm(3, tmp_path, *PACED, *QUICK, *RUN) as swarm:
        swarm.start_all()
        swarm.workers["w2"].wait_for_round(1)
        swarm.workers["w2"].send(signal.SIGKILL)
        results = swarm.wait("w0", "w1")
    reports = {name: report_of(tmp_path / name) for name in ("w0", "w1")}
    for report in reports.values():
        peers = {peer["peer"]: peer for peer in report["peers"]}
        assert sorted(peers) == swarm.names
        assert (peers["w2"]["state"], peers["w2"]["anchor_hash"]) == ("dead", None)
        assert 10 <= peers["w2"]["step"] < 100
        for name, result in results.items():
            assert peers[name]["anchor_hash"] == result["anchor_hash"]
            assert peers[name]["state"] == "done"
        assert report["hashes_agree"] is True
    lines = (tmp_path / "w0" / "report.txt").read_text()
    assert "w2" in lines
    assert "all 2 that reported hold identical anchors" in lines
    told = printed("report", str(tmp_path / "w1"), "--no-picture")
    assert told == (tmp_path / "w1" / "report.txt").read_text()
    assert not (tmp_path / "w2" / "report.json").exists()
