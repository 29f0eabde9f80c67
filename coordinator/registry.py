"""What the coordinator knows of the swarm: a state machine without I/O or clock.

It keeps no file. Started again, it learns everything back from the workers' next calls.
"""

from dataclasses import dataclass, field

from murmuration.coordinator.records import Record
from murmuration.protos import murmuration_pb2 as pb
from murmuration.protos.documents import (
    EVENT_BYTES,
    MANIFEST_BYTES,
    PROFILE_BYTES,
    BadDocument,
    manifest_difference,
    run_name,
    unpack,
)
from murmuration.protos.events import Event, costliest, printable

LOST_AFTER_S = 15.0
MAX_MEMBERS = 1024
_SETTINGS = (("diloco", "preset"), ("run", "steps"), ("diloco", "inner_steps"), ("run", "seed"))
_MAX_NAME_BYTES = 256
MAX_EPOCH = 2**53  # as workers have it
_MAX_EVENTS = 64  # of one call, as many as a worker sends
_PHASES = {value: name.removeprefix("PHASE_").lower() for name, value in pb.Phase.items()}
_HEALTH = {value: name.removeprefix("HEALTH_").lower() for name, value in pb.Health.items()}


@dataclass
class KnownPeer:
    """One worker: what it last said, when it last called (monotonic s), and its record."""

    member: pb.Member
    heard_s: float
    record: Record

    def silent_s(self, now: float) -> float:
        return now - self.heard_s

    def health(self, now: float) -> str:
        """As the worker says itself, or `lost` when it has not called for 15 s."""
        if self.record.result is None and self.silent_s(now) > LOST_AFTER_S:
            return "lost"
        return _HEALTH.get(self.member.health, "unknown")

    def over(self, now: float, patience_s: float) -> bool:
        """Whether nothing more is expected: a result is here, or it is silent for so long."""
        return self.record.result is not None or self.silent_s(now) > patience_s


@dataclass(frozen=True)
class Introduction:
    """The answer to one call, and the events that it brought."""

    reply: pb.IntroduceReply
    events: list[Event] = field(default_factory=list)


class Registry:
    """All workers of one run. The first manifest that comes is the run's."""

    def __init__(self) -> None:
        self.members: dict[str, KnownPeer] = {}
        self.keys: dict[str, str] = {}  # fingerprints, by name, where calls are encrypted
        self.manifest = b""
        self.run = ""
        self.refused: dict[str, int] = {}

    def introduce(self, request: pb.IntroduceRequest, now: float) -> Introduction:
        """Takes a worker's call at monotonic time `now` (s). A worker that has started again with
        an earlier epoch is handed its own earlier member, to take a later one."""
        member = pb.Member()
        member.CopyFrom(request.member)  # a part of the request would keep all of it in memory
        refusal = "bad member: its epoch cannot be" if member.epoch > MAX_EPOCH else ""
        if refusal := refusal or self._refusal(request, now):
            kind = refusal.partition(":")[0]
            self.refused[kind] = self.refused.get(kind, 0) + 1
            return Introduction(pb.IntroduceReply(refusal=refusal, manifest=self.manifest))
        known = self.members.get(member.peer)
        if known is None or member.epoch > known.member.epoch:
            record = Record(member.peer, address=printable(member.address), heard_s=now)
            if known is not None:
                record.moved_before(known.record)
            known = self.members[member.peer] = KnownPeer(member, now, record)
        events: list[Event] | None = None  # of an older life, which changes nothing
        if member.epoch == known.member.epoch:
            if member.heartbeat >= known.member.heartbeat:
                known.member = member
            known.heard_s = known.record.heard_s = now
            events = self._events(request, known.record, now)
        others = [
            known.member
            for name, known in sorted(self.members.items())
            if (known.silent_s(now) <= LOST_AFTER_S if name != member.peer else events is None)
        ]
        return Introduction(pb.IntroduceReply(manifest=self.manifest, members=others), events or [])

    def records(self) -> list[Record]:
        return [known.record for _, known in sorted(self.members.items())]

    def all_over(self, expected: int, now: float, patience_s: float) -> bool:
        """Whether the expected workers have been here, and nothing more is expected of any."""
        members = self.members.values()
        return len(members) >= expected and all(m.over(now, patience_s) for m in members)

    def settings(self) -> dict[str, object]:
        """The run's settings as its manifest has them: preset, steps, inner_steps, seed."""
        document = unpack(self.manifest, MANIFEST_BYTES) if self.manifest else {}
        found = {}
        for section, key in _SETTINGS:
            values = document.get(section)
            if isinstance(values, dict) and isinstance(values.get(key), int | str):
                found[key] = values[key]
        return found

    def mark_lost(self, now: float) -> None:
        """Writes into the records which workers are lost: the last word on them."""
        for known in self.members.values():
            if known.health(now) == "lost":
                known.record.state = "lost"

    def status(self, now: float) -> dict[str, object]:
        """The document that `murmur status` shows."""
        members = [known for _, known in sorted(self.members.items())]
        staged = any(known.member.stage > 0 for known in members)
        return {
            "kind": "coordinator",
            "run": self.run,
            "members": [_row(known, now, staged) for known in members],
            "rounds_completed": max((r.rounds_completed or 0 for r in self.records()), default=0),
            "refused": dict(self.refused),
            "verdicts": [
                verdict
                for verdict in costliest(known.record.verdicts for known in members)
                if "until" not in verdict
            ],
        }

    # --------------------------------------------------------------------------------- inside

    def _refusal(self, request: pb.IntroduceRequest, now: float) -> str:
        """Why this caller is turned away; empty: welcome."""
        member = request.member
        for name in (member.peer, member.address):
            if not 0 < len(name.encode()) <= _MAX_NAME_BYTES or printable(name) != name:
                return "bad member: name and address must be 1 to 256 bytes of printable text"
        if len(member.profile) > PROFILE_BYTES or member.ByteSize() > 3 * PROFILE_BYTES:
            return f"bad member: {member.ByteSize()} bytes; no worker would believe it"
        if self.manifest and request.manifest:
            if difference := manifest_difference(self.manifest, request.manifest):
                return difference
        elif request.manifest:
            try:
                self.run = run_name(request.manifest)
            except BadDocument as error:
                return f"the manifest cannot be read: {error}"
            self.manifest = request.manifest
        if member.peer not in self.members and len(self.members) >= MAX_MEMBERS:
            silent = max(self.members.values(), key=lambda known: known.silent_s(now))
            if silent.silent_s(now) <= LOST_AFTER_S:
                return f"full: {MAX_MEMBERS} workers are here"
            del self.members[silent.member.peer]
        return ""

    def _events(self, request: pb.IntroduceRequest, record: Record, now: float) -> list[Event]:
        events: list[Event] = []
        for raw in request.events[:_MAX_EVENTS]:
            try:
                event = {**unpack(raw, EVENT_BYTES), "peer": record.peer}
            except BadDocument:
                self.refused["bad event"] = self.refused.get("bad event", 0) + 1
                continue
            if event.get("event") == "exit" or (event == record.result):
                continue  # the supervisor's word, not a worker's; a result that is here already
            record.apply(event, now)
            events.append(event)
        return events


def _row(known: KnownPeer, now: float, staged: bool) -> dict[str, object]:
    record, member = known.record, known.member
    return {
        "peer": member.peer,
        **({"stage": member.stage} if staged else {}),
        "address": member.address,
        "health": known.health(now),
        "phase": _PHASES.get(member.phase, "unknown"),
        "step": max(member.step, record.step),
        "loss": record.loss,
        "rounds": record.rounds_completed,
        "bytes_sent": record.bytes_sent,
        "bytes_received": record.bytes_received,
        "heard_s_ago": round(known.silent_s(now), 1),
    }
