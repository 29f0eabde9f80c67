"""A run's report as a row of the table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from protos.events import float_of, int_of, printable, text_of
from protos.figures import count
from tests.bench.compare.asked import LOCAL
from tests.bench.compare.budget import Measured, wall_of

Report = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run; None is what was not measured.

    Args:
        name: the preset or the system.
        title: how a system calls itself; None for presets.
        steps: done; `asked_steps` those asked for. Where they differ, wall_s and what follows from
            it are extrapolated, and there is no loss: it would belong to another schedule.
        wall_s: from the first inner step to the last.
        step_s: of forward, backward and inner step alone; tells how busy the machine was.
        compute_utilization: share of wall_s in forward, backward and inner step.
        relative_speed: tokens per second, against `local` on the same link.
        stall_per_round_s: pauses of the training.
        sent_per_step_bytes: of one worker, everything that it sends: whole Ethernet frames where
            the link has counted them, as other systems' reports have it, else what it gave to TCP.
        bits_per_parameter: what travelled of each value sent, after compression.
        problem: why there are no figures.
        remarks: what one has to know about the figures.
    """

    name: str
    asked_steps: int
    title: str | None = None
    steps: int | None = None
    inner_steps: int | None = None
    wall_s: float | None = None
    step_s: float | None = None
    compute_utilization: float | None = None
    relative_speed: float | None = None
    stall_per_round_s: float | None = None
    sent_per_step_bytes: float | None = None
    bits_per_parameter: float | None = None
    val_loss: float | None = None
    rounds: int | None = None
    problem: str | None = None
    failed: bool = False
    remarks: tuple[str, ...] = ()

    @property
    def extrapolated(self) -> bool:
        return self.steps is not None and self.steps != self.asked_steps

    @property
    def notes(self) -> tuple[str, ...]:
        """All that is to be said of the row in words."""
        notes = [self.problem] if self.problem else []
        if self.extrapolated:
            notes.append(f"{self.steps:,} of {count(self.asked_steps, 'step')}")
        return (*notes, *self.remarks)


def speed_of(report: Report) -> float | None:
    """Inner steps a second."""
    steps, wall_s = int_of(report, "steps"), float_of(report, "wall_s")
    return steps / wall_s if steps and wall_s else None


def row_of(name: str, asked_steps: int, report: Report, local_speed: float | None) -> Row:
    """Of a run that came to its end.

    Args:
        asked_steps: of the whole run, of which the report may be a shorter one.
        report: that of `murmur swarm` or of `tests/bench/peers`; any key may be missing or None.
        local_speed: inner steps a second of `local`.
    """
    steps, rounds = int_of(report, "steps"), int_of(report, "rounds_completed") or 0
    wall_s, compute_s = float_of(report, "wall_s"), float_of(report, "compute_s")
    stall_s, inner_steps = float_of(report, "stall_s"), int_of(report, "inner_steps")
    if steps and wall_s is not None:
        wall_s = wall_of(
            Measured(
                steps=steps,
                wall_s=wall_s,
                compute_s=compute_s or 0.0,
                stall_s=stall_s or 0.0,
                rounds=rounds,
                inner_steps=inner_steps or 1,
            ),
            asked_steps,
        )
    utilization = speed = None
    if steps and wall_s:
        if compute_s is not None:
            utilization = compute_s * asked_steps / steps / wall_s
        speed = asked_steps / wall_s / local_speed if local_speed else None
    sent = _sent_bytes(report)
    return Row(
        name=name,
        title=text_of(report, "system"),
        asked_steps=asked_steps,
        steps=steps,
        inner_steps=inner_steps if rounds else None,
        wall_s=wall_s,
        step_s=compute_s / steps if steps and compute_s is not None else None,
        compute_utilization=utilization,
        relative_speed=speed,
        stall_per_round_s=stall_s / rounds if rounds and stall_s is not None else None,
        sent_per_step_bytes=sent / steps if steps and sent is not None and rounds else None,
        bits_per_parameter=_bits(report.get("bits_per_value")),
        val_loss=float_of(report, "val_loss") if steps == asked_steps else None,
        rounds=rounds,
        remarks=_remarks(name, report),
    )


def problem_row(name: str, asked_steps: int, problem: str, *, failed: bool = False) -> Row:
    """Of a run that has no figures. Args: failed: it was tried."""
    line = " ".join(printable(problem).split())
    return Row(name=name, asked_steps=asked_steps, problem=line, failed=failed)


def _sent_bytes(report: Report) -> float | None:
    """Mean over the workers."""
    link_bytes, means = report.get("link_bytes"), text_of(report, "link_means") or ""
    if isinstance(link_bytes, Mapping) and "namespaces" in means:
        counted = [
            sent
            for counters in link_bytes.values()
            if isinstance(counters, Mapping)
            and (sent := float_of(counters, "sent_bytes")) is not None
        ]
        if counted:
            return sum(counted) / len(counted)
    return float_of(report, "bytes_sent_per_worker")


def _bits(bits_per_value: object) -> float | None:
    """Of contributions and reductions together, weighted by how many values each carried."""
    if not isinstance(bits_per_value, Mapping):
        return None
    bits = values = 0.0
    for part in bits_per_value.values():
        if not isinstance(part, Mapping):
            continue
        travelled = float_of(part, "bits_travelled")
        payload_bytes = float_of(part, "payload_bytes")
        if travelled and payload_bytes:
            bits += 8 * payload_bytes
            values += 8 * payload_bytes / travelled
    return bits / values if values else None


def _remarks(name: str, report: Report) -> tuple[str, ...]:
    """What went less well than the figures look."""
    remarks = []
    rounds = int_of(report, "rounds_completed") or 0
    if partial := int_of(report, "rounds_partial"):
        remarks.append(f"{partial} of {count(rounds, 'round')} averaged without everybody's part")
    if failed := int_of(report, "rounds_failed"):
        remarks.append(f"{count(failed, 'failed round')}, over all workers")
    peers = [peer for peer in report.get("peers") or () if isinstance(peer, Mapping)]
    if lost := sum(1 for peer in peers if peer.get("exit_code")):
        remarks.append(f"{count(lost, 'worker')} did not come to the end")
    # Systems that average to rounding differ by rounding; only a difference that shows counts.
    spread = float_of(report, "val_loss_spread")
    if report.get("hashes_agree") is False and name != LOCAL and (spread is None or spread > 1e-3):
        remarks.append("replicas differ")
    return tuple(remarks)
