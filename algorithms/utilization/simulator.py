"""Compute utilization: the share of the time in which a worker computes, over link speeds.

A step is 3L-1 nodes of equal length: the forward passes of layers 1..L, then for layers L..1 the
backward pass to the activations (not for layer 1) and that to the parameters. What is sent passes
one link, first come, first served. Two readings of when:

    per layer   the paper's. Of the fragments due after step s, layer l is ready after its backward
                pass of step s, and the forward pass of layer l in step s + 1 + tau waits for it.
    per step    our engine. A due fragment is sent as a whole after step s; after step s + tau
                training waits for it, and then sends what is due there.

The system is periodic with H; it is simulated from rest, and the first periods are not counted.
Only steps in which something is sent or awaited cost anything, whatever H is.

Ref: arXiv:2501.18512, its table of link speeds (`make plan-table` compares all 75 entries). How
many bits its all-reduce moves for a parameter it does not say: 13.4, whatever they consist of, fit
its table best. Ours beyond it: latency, any tau up to H, and bits from n peers and two codecs.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from algorithms.fragments import layer_of
from algorithms.utilization.workload import Rounds, Workload

__all__ = ["utilization"]

Floats = npt.NDArray[np.float64]
_WARM_PERIODS = 4
_COUNTED_PERIODS = 4


def utilization(
    workload: Workload,
    rounds: Rounds,
    rates_mbps: Floats,
    *,
    latency_s: float = 0.0,
    per_layer: bool = False,
) -> Floats:
    """Computing time over all time, at each link speed.

    Args:
        workload: the model and its step.
        rounds: what is sent and when.
        rates_mbps: speeds of a worker's link, shape (R,), in Mbit/s; infinity is allowed.
        latency_s: added to each transfer without occupying the link: the one-way delay times the
            hops of an exchange (contribution and reduction: 2).
        per_layer: the paper's reading, otherwise our engine's.

    Returns:
        Shape (R,), above 0, at most 1.
    """
    sends = _sends_per_layer(workload, rounds) if per_layer else _sends_per_step(workload, rounds)
    s_per_bit = 1 / (np.asarray(rates_mbps, dtype=np.float64) * 1e6)
    link = _Link(s_per_bit, latency_s)
    marks = [_WARM_PERIODS * rounds.inner_steps]
    marks.append(marks[0] + _COUNTED_PERIODS * rounds.inner_steps)
    run = _run_per_layer if per_layer else _run_per_step
    began, ended = run(workload, rounds, sends, link, marks)
    computing_s = _COUNTED_PERIODS * rounds.inner_steps * workload.step_s
    return np.minimum(computing_s / (ended - began), 1.0)


@dataclass(frozen=True)
class _Sends:
    """What is sent in one step, in order; each array has shape (C,).

    Args: ready_s: from the end of the forward pass until it is ready; needed_s: from where it is
    awaited until the end of the forward pass; bits: its size.
    """

    ready_s: Floats
    needed_s: Floats
    bits: Floats


class _Link:
    """One serial link at R speeds at once."""

    def __init__(self, s_per_bit: Floats, latency_s: float) -> None:
        self._s_per_bit, self._latency_s = s_per_bit, latency_s
        self._free_s = np.zeros_like(s_per_bit)
        self.rates = s_per_bit.size

    def send(self, ready_s: Floats, bits: Floats) -> Floats:
        """When each is there, shape (R, C), if they are ready so, in order of `ready_s` (R, C)."""
        lasts_s = self._s_per_bit[:, None] * bits
        done_s = np.cumsum(lasts_s, axis=1)
        # c leaves when it and all before it, from some earliest b on, have passed without a gap.
        starts_s = np.maximum.accumulate(ready_s - (done_s - lasts_s), axis=1)
        ends_s: Floats = np.maximum(starts_s, self._free_s[:, None]) + done_s
        self._free_s = ends_s[:, -1]
        return ends_s + self._latency_s


def _sends_per_step(workload: Workload, rounds: Rounds) -> dict[int, _Sends]:
    """By step of the period. Fragments as a whole, all ready together at the step's end."""
    return {
        step: _Sends(
            ready_s=np.zeros(len(due)),
            needed_s=np.zeros(len(due)),
            bits=np.array([rounds.fragment_bits[index] for index in due]),
        )
        for step, due in rounds.due().items()
    }


def _sends_per_layer(workload: Workload, rounds: Rounds) -> dict[int, _Sends]:
    """By step of the period. Outside of the layers: ready last, needed first."""
    layers = len(workload.layers)
    node_s = workload.step_s / (3 * layers - 1)
    sends = {}
    for step, due in rounds.due().items():
        parts = []
        for index in due:
            fragment, bits = rounds.fragments[index], rounds.fragment_bits[index]
            for spec in fragment.specs:
                layer = layer_of(spec.name) or 0
                ready = 2 * (layers - layer) if layer else 2 * layers - 1
                share = spec.elements / fragment.elements
                parts.append((ready * node_s, (layers - layer) * node_s, bits * share))
        ready_s, needed_s, sizes = np.array(sorted(parts)).T
        sends[step] = _Sends(ready_s, needed_s, sizes)
    return sends


def _events(rounds: Rounds, after: int, last: int) -> Iterator[int]:
    """The steps up to `last` in which something is sent, or awaited `after` steps later."""
    if not rounds.fragments:
        return
    phases = {(step + later) % rounds.inner_steps for step in rounds.due() for later in (0, after)}
    yield from (step for step in range(1, last + 1) if step % rounds.inner_steps in phases)


def _run_per_step(
    workload: Workload, rounds: Rounds, sends: dict[int, _Sends], link: _Link, marks: list[int]
) -> list[Floats]:
    """When each marked step ends, its waiting included."""
    tau = rounds.overlap_steps
    now_s, done, flight = np.zeros(link.rates), 0, dict[int, Floats]()
    times = []
    for step in sorted({*_events(rounds, tau, marks[-1]), *marks}):
        now_s = now_s + (step - done) * workload.step_s
        done = step
        if tau and (there_s := flight.pop(step - tau, None)) is not None:
            now_s = np.maximum(now_s, there_s)
        due = sends.get((step - 1) % rounds.inner_steps + 1)
        if due is not None:
            there_s = link.send(now_s[:, None] + due.ready_s, due.bits)[:, -1]
            if tau:
                flight[step] = there_s
            else:
                now_s = np.maximum(now_s, there_s)
        if step in marks:
            times.append(now_s)
    return times


def _run_per_layer(
    workload: Workload, rounds: Rounds, sends: dict[int, _Sends], link: _Link, marks: list[int]
) -> list[Floats]:
    """When the backward pass of each marked step ends."""
    after = rounds.overlap_steps + 1
    layers = len(workload.layers)
    forward_s = layers * workload.step_s / (3 * layers - 1)
    now_s, done, flight = np.zeros(link.rates), 0, dict[int, Floats]()
    times = []
    for step in sorted({*_events(rounds, after, marks[-1]), *marks}):
        now_s = now_s + (step - done - 1) * workload.step_s + forward_s
        done = step
        if (earliest_s := flight.pop(step - after, None)) is not None:
            now_s = np.maximum(now_s, earliest_s)
        due = sends.get((step - 1) % rounds.inner_steps + 1)
        if due is not None:
            there_s = link.send(now_s[:, None] + due.ready_s, due.bits)
            flight[step] = (there_s + due.needed_s).max(axis=1)
        now_s = now_s + (workload.step_s - forward_s)
        if step in marks:
            times.append(now_s)
    return times
