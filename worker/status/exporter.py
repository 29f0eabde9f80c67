"""`/metrics` of one peer, for Prometheus: the numbers of its status document, read at each scrape.

Nothing is counted here. What `murmur status` shows and what a scrape returns is one document.
"""

import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, Metric, ProcessCollector, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.registry import Collector

from murmuration.protos.addresses import THIS_MACHINE, is_loopback, join_address, split_address
from murmuration.protos.reach import cannot_listen
from murmuration.worker.membership import Health, Phase
from murmuration.worker.transport import AddressInUse

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

Document = Mapping[str, Any]

_PREFIX = "murmuration_"
_GAUGES = {
    "step": ("step", "Position in the run's schedule, in inner steps."),
    "steps": ("steps", "Inner steps of the whole run."),
    "loss": ("loss", "Training loss of the last inner step, in the task's own unit."),
    "val_loss": ("validation_loss", "Held-out loss of the anchors, with [run] evaluate_every."),
    "learning_rate": ("learning_rate", "Of the last inner step."),
    "gradient_norm": ("gradient_norm", "Of the last step's gradient, before it is clipped."),
    "steps_per_s": ("steps_per_second", "Inner steps a second over the last ten, with all waits."),
    "samples_per_s": ("samples_per_second", "Samples a second, likewise."),
    "tokens_per_s": ("tokens_per_second", "Tokens a second, likewise."),
}
_COUNTERS = {
    "samples": "Samples that were learned from.",
    "tokens": "Tokens that were learned from.",
}
_ROUND_COUNTERS = {
    "steps_lost": "Inner steps undone, since values were not finite.",
    "late": "Own rounds that closed without this peer's part.",
    "takeovers": "Shards of own rounds whose reducer was lost.",
}
_WAYS = ("sent", "received")
_AT_ONCE = 16  # connections, each of which has a thread
_IDLE_S = 5.0


class StatusCollector(Collector):
    """Metrics of a status document. any thread.

    Args:
        status: reads the document; may raise RuntimeError or TimeoutError when the peer is ending,
            which then has no figures.
    """

    def __init__(self, status: Callable[[], Document]) -> None:
        self._status = status

    def describe(self) -> Iterator[Metric]:
        """Nothing: the peer need not be there yet."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """What the peer says now."""
        try:
            document = self._status()
        except (RuntimeError, TimeoutError):
            return
        yield from metrics_of(document)


def metrics_of(document: Document) -> Iterator[Metric]:
    """All of a worker's status document; what is not known yet is left out."""
    peer = str(document["peer"])

    def gauge(name: str, text: str, values: Mapping[Any, object], *labels: str) -> Metric:
        return _filled(GaugeMetricFamily, peer, name, text, values, labels)

    def counter(name: str, text: str, values: Mapping[Any, object], *labels: str) -> Metric:
        return _filled(CounterMetricFamily, peer, name, text, values, labels)

    run = document["run"], document["preset"], version("murmuration")
    yield gauge("peer_info", "Always 1.", {run: 1}, "run", "preset", "version")
    for key, (name, text) in _GAUGES.items():
        yield gauge(name, text, {(): document.get(key)})
    for key, text in _COUNTERS.items():
        yield counter(key, text, {(): document.get(key)})
    phases = {each.name.lower(): int(each.name.lower() == document["phase"]) for each in Phase}
    yield gauge("phase", "1 for the phase that the peer is in.", phases, "phase")
    healths = [member["health"] for member in document["members"]]
    known = {each.name.lower(): healths.count(each.name.lower()) for each in Health}
    yield gauge(
        "members", "Peers of the run, this one among them, as it sees them.", known, "health"
    )
    rounds = document["rounds"]
    outcomes = {key: rounds[key] for key in ("completed", "failed")}
    yield counter("rounds", "This peer's outer rounds.", outcomes, "outcome")
    for key, text in _ROUND_COUNTERS.items():
        yield counter(key, text, {(): rounds[key]})
    took = SummaryMetricFamily(
        f"{_PREFIX}round_seconds", "How long completed rounds were on their way.", labels=["peer"]
    )
    took.add_metric([peer], count_value=rounds["completed"], sum_value=rounds["exchange_s"])
    yield took
    traffic, relayed = document["traffic"], document["relayed"]
    crossed = {
        (way, plane.lower(), method): count
        for way in _WAYS
        for full_name, count in sorted(traffic[f"{way}_by_method"].items())
        for plane, _, method in [full_name.partition("/")]
    }
    text = "Bytes as they stand in the TCP stream, by plane and method."
    yield counter("bytes", text, crossed, "direction", "plane", "method")
    payload = {way: traffic[f"payload_bytes_{way}"] for way in _WAYS}
    text = "Of these, encoded pseudo-gradients, reductions and anchors."
    yield counter("payload_bytes", text, payload, "direction")
    text = "Carried between others, by whom they reach so."
    yield counter("relayed_bytes", text, relayed["relayed_bytes"], "for")
    yield gauge("tunnels", "Between others, open through this peer.", {(): relayed["tunnels"]})
    text = "Messages that were not taken, by reason."
    yield counter("refused", text, document["refused"], "reason")
    if "microbatches" in document:
        counted = document["microbatches"]
        yield counter("microbatches", "Of a stage: what became of them.", counted, "what")
    costs = {(v["kind"], v["peer"], v.get("to", "")): v["cost"] for v in document["verdicts"]}
    text = "Faults located now: the share of the rounds' time that each costs."
    yield gauge("fault_cost_ratio", text, costs, "kind", "slow", "to")
    lag_s = {key: value / 1000 for key, value in document["loop_lag_ms"].items()}
    yield gauge("loop_lag_seconds", "How late the I/O loop wakes, since its start.", lag_s, "at")


def _filled(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    peer: str,
    name: str,
    text: str,
    values: Mapping[Any, object],
    labels: Sequence[str],
) -> Metric:
    """One family with a value for each that is a number. Args: values: by what stands in the
    labels, a tuple where these are not one."""
    family = kind(f"{_PREFIX}{name}", text, labels=["peer", *labels])
    for key, value in values.items():
        if isinstance(value, int | float):
            family.add_metric([peer, *(key if isinstance(key, tuple) else [key])], value)
    return family


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each connection, so many at once; others are closed."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._places = threading.BoundedSemaphore(_AT_ONCE)
        super().__init__(address, _Request)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that goes away is no event."""


class _Request(WSGIRequestHandler):
    timeout = _IDLE_S

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are logged nowhere."""


def _of_this_machine(app: "WSGIApplication") -> "WSGIApplication":
    """Answers only under names of this machine: a name that somebody else points here would let any
    page that is open in a browser read along."""

    def answer(environ: "WSGIEnvironment", start: "StartResponse") -> Iterable[bytes]:
        host = str(environ.get("HTTP_HOST", "")).lower()
        name = host[: host.find("]") + 1] if host.startswith("[") else host.partition(":")[0]
        if name in THIS_MACHINE:
            return app(environ, start)
        start("400 Bad Request", [("Content-Type", "text/plain")])
        return [b"this is served under names of this machine alone\n"]

    return answer


class MetricsServer:
    """Serves `/metrics` over HTTP, from threads of its own.

    Args:
        address: HOST:PORT; port 0 takes a free one.
        status: as `StatusCollector` takes it.

    Raises:
        AddressInUse: another process listens there, or the address is not this machine's.
    """

    def __init__(self, address: str, status: Callable[[], Document]) -> None:
        host, port = split_address(address)
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        registry.register(StatusCollector(status))
        try:
            self._server = _Server((host, port))
        except OSError as error:
            raise AddressInUse(cannot_listen("--metrics", address, error)) from error
        app = make_wsgi_app(registry)
        self._server.set_app(_of_this_machine(app) if is_loopback(host) else app)
        serve = self._server.serve_forever
        self._thread = threading.Thread(target=serve, name="murmur-metrics", daemon=True)
        self._thread.start()
        self.url = f"http://{join_address(host, self._server.server_port)}/metrics"

    def close(self) -> None:
        """Serves no more, and frees the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
