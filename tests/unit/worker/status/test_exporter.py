"""`/metrics`: every number is the status document's, and the server frees its port."""

import socket
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Metric

from murmuration.protos.addresses import split_address
from murmuration.worker.status.exporter import StatusCollector, metrics_of, metrics_server
from tests.support.worker_status import STATUS


def samples(families: Iterator[Metric]) -> dict[tuple[str, ...], float]:
    """(name, values of all labels but the peer's) -> value; all are of peer w0."""
    found = {}
    for family in families:
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("peer") == "w0"
            found[(sample.name.removeprefix("murmuration_"), *labels.values())] = sample.value
    return found


def test_every_number_of_the_status_is_a_metric():
    found = samples(metrics_of(STATUS))
    numbers = {
        ("step",): 120, ("steps",): 2000, ("validation_loss",): 2.25, ("learning_rate",): 0.003,
        ("steps_per_second",): 9.5, ("tokens_total",): 61440, ("tokens_per_second",): 4864,
        ("phase", "training"): 1, ("phase", "done"): 0, ("members", "alive"): 2,
        ("members", "suspect"): 1, ("members", "dead"): 0, ("rounds_total", "completed"): 6,
        ("rounds_total", "failed"): 1, ("steps_lost_total",): 9, ("late_total",): 2,
        ("takeovers_total",): 3, ("round_seconds_count",): 6, ("round_seconds_sum",): 4.5,
        ("bytes_total", "sent", "control", "Gossip"): 1600,
        ("bytes_total", "sent", "data", "PairRound"): 9000,
        ("bytes_total", "received", "data", "PairRound"): 8000,
        ("payload_bytes_total", "sent"): 8900, ("payload_bytes_total", "received"): 7900,
        ("relayed_bytes_total", "w3"): 7000, ("tunnels",): 2, ("refused_total", "invalid"): 2,
        ("refused_total", "again"): 5, ("microbatches_total", "visits"): 40,
        ("loop_lag_seconds", "p99"): 0.004, ("fault_cost_ratio", "uplink", "w2", ""): 0.04,
    }  # fmt: skip
    assert {key: found.get(key) for key in numbers} == numbers
    (info,) = (key for key in found if key[0] == "peer_info")
    assert info[1:3] == ("00000000000000aa", "noloco")


def test_what_is_not_known_is_left_out():
    whole = {key: value for key, value in STATUS.items() if key != "microbatches"}
    names = {key[0] for key in samples(metrics_of(whole))}
    assert names.isdisjoint({"loss", "samples_total", "samples_per_second", "microbatches_total"})


def test_a_peer_that_is_ending_has_no_figures():
    def status() -> dict[str, Any]:
        raise RuntimeError("Event loop is closed")

    registry = CollectorRegistry()
    registry.register(StatusCollector(status))
    assert list(registry.collect()) == []


def test_a_port_that_is_taken_is_told_and_a_closed_server_frees_its_own():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"^cannot listen on 127.0.0.1:{port}: .*--metrics HOST"):
            metrics_server(f"127.0.0.1:{port}", lambda: STATUS)
    server = metrics_server("127.0.0.1:0", lambda: STATUS)
    server.close()
    socket.create_server(split_address(server.url.removeprefix("http://").rstrip("/"))).close()


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost:9", 200), ("127.0.0.1", 200), ("[::1]:9", 200), ("somebody.example", 400)],
)
def test_it_is_served_under_names_of_this_machine(host, status):
    server = metrics_server("127.0.0.1:0", lambda: STATUS)
    connection = HTTPConnection(*split_address(server.url[7:-1]), timeout=20)
    connection.request("GET", "/metrics", headers={"Host": host})
    assert connection.getresponse().status == status
    connection.close()
    server.close()
