"""`/metrics` of one peer, for Prometheus: the numbers of its status document, read at each scrape.
Nothing is counted here: `murmur status` shows the same document."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from typing import Any

from prometheus_client import CollectorRegistry, Metric, ProcessCollector, make_asgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.registry import Collector
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp

from murmuration.protos.addresses import is_loopback, split_address
from murmuration.worker.membership import Health, Phase
from murmuration.worker.views.page import THIS_MACHINE, WebServer
from murmuration.worker.views.summary import Document

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
    "mfu": ("mfu_ratio", "Share of the device's operations a second that the model takes."),
    "device_memory_bytes": ("device_memory_bytes", "Held by tensors there, at most so far."),
}
_COUNTERS = {key: f"{key.capitalize()} that were learned from." for key in ("samples", "tokens")}
_ROUND_COUNTERS = {
    "steps_lost": "Inner steps undone, since values were not finite.",
    "late": "Own rounds that closed without this peer's part.",
    "takeovers": "Shards of own rounds whose reducer was lost.",
}
_WAYS = ("sent", "received")


class StatusCollector(Collector):
    """Metrics of a status document. any thread. `status` may raise RuntimeError or TimeoutError
    when the peer is ending, which then has no figures."""

    def __init__(self, status: Callable[[], Document]) -> None:
        self._status = status

    def describe(self) -> Iterator[Metric]:
        """Nothing: the peer need not be there yet."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        with suppress(RuntimeError, TimeoutError):
            yield from metrics_of(self._status())


def metrics_of(document: Document) -> Iterator[Metric]:
    """Makes metrics of a document. Values that are not known yet are left out."""
    peer = str(document["peer"])
    gauge = partial(_filled, GaugeMetricFamily, peer)
    counter = partial(_filled, CounterMetricFamily, peer)

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
    text = "Peers of the run, this one among them, as it sees them."
    yield gauge("members", text, known, "health")
    rounds = document["rounds"]
    outcomes = {key: rounds[key] for key in ("completed", "failed")}
    yield counter("rounds", "This peer's outer rounds.", outcomes, "outcome")
    for key, text in _ROUND_COUNTERS.items():
        yield counter(key, text, {(): rounds[key]})
    text = "How long completed rounds were on their way."
    took = SummaryMetricFamily(f"{_PREFIX}round_seconds", text, labels=["peer"])
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
    *labels: str,
) -> Metric:
    family = kind(f"{_PREFIX}{name}", text, labels=["peer", *labels])
    for key, value in values.items():
        if isinstance(value, int | float):
            family.add_metric([peer, *(key if isinstance(key, tuple) else [key])], value)
    return family


def metrics_server(address: str, status: Callable[[], Document]) -> WebServer:
    """Serves the figures over HTTP; on loopback only under names of this machine, as the page is.
    Args: address: HOST:PORT; port 0 takes a free one. Raises OSError: it cannot listen there."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(StatusCollector(status))
    app: ASGIApp = make_asgi_app(registry)
    if is_loopback(split_address(address)[0]):
        app = TrustedHostMiddleware(app, allowed_hosts=THIS_MACHINE, www_redirect=False)
    return WebServer("--metrics", address, app)
