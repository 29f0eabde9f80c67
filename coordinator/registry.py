"""Keeps what the coordinator knows of the swarm: a state machine without I/O or clock. It has no
file: started again, it learns everything back from the workers' next calls."""

from collections import Counter
from dataclasses import dataclass

from murmuration.protos import murmuration_pb2 as pb
from murmuration.protos.addresses import check_address, check_name
from murmuration.protos.documents import (
    MAX_START_MS,
    PROFILE_BYTES,
    BadDocument,
    manifest_difference,
    run_name,
)

LOST_AFTER_S = 15.0
MAX_MEMBERS = 1024
_PHASES = {value: name.removeprefix("PHASE_").lower() for name, value in pb.Phase.items()}
_HEALTH = {value: name.removeprefix("HEALTH_").lower() for name, value in pb.Health.items()}


@dataclass
class KnownPeer:
    """One worker: what it last said, and when it last called (monotonic s)."""

    member: pb.Member
    heard_s: float

    def silent_s(self, now: float) -> float:
        return now - self.heard_s

    def health(self, now: float) -> str:
        """As the worker says itself, or `lost` when it has not called for 15 s."""
        if not self.done and self.silent_s(now) > LOST_AFTER_S:
            return "lost"
        return _HEALTH.get(self.member.health, "unknown")

    @property
    def done(self) -> bool:
        """Tells whether it trains no more: the run's last step is taken, or it leaves."""
        return self.member.phase in (pb.PHASE_DONE, pb.PHASE_LEAVING)


class Registry:
    """All workers of one run. The first manifest that comes is the run's."""

    def __init__(self) -> None:
        self.members: dict[str, KnownPeer] = {}
        self.keys: dict[str, str] = {}  # fingerprints, by name, where calls are encrypted
        self.manifest, self.run = b"", ""
        self.refused: Counter[str] = Counter()

    def introduce(self, request: pb.IntroduceRequest, now: float) -> pb.IntroduceReply:
        """Takes a worker's call at monotonic time `now` (s). A worker that has started again with
        an earlier start is handed its own earlier member, to take a later one."""
        member = pb.Member()
        member.CopyFrom(request.member)  # a part of the request would keep all of it in memory
        if refusal := self._refusal(member, request.manifest, now):
            self.refused[refusal.partition(":")[0]] += 1
            return pb.IntroduceReply(refusal=refusal, manifest=self.manifest)
        known = self.members.get(member.peer)
        if known is None or member.start_ms > known.member.start_ms:
            known = self.members[member.peer] = KnownPeer(member, now)
        is_current = member.start_ms == known.member.start_ms  # an older life changes nothing
        if is_current:
            if member.heartbeat >= known.member.heartbeat:
                known.member = member
            known.heard_s = now
        others = [
            known.member
            for name, known in sorted(self.members.items())
            if (known.silent_s(now) <= LOST_AFTER_S if name != member.peer else not is_current)
        ]
        return pb.IntroduceReply(manifest=self.manifest, members=others)

    def all_over(self, expected: int, now: float, patience_s: float) -> bool:
        """Tells whether all expected workers have been here, each done or silent for so long."""
        members = self.members.values()
        return len(members) >= expected and all(
            known.done or known.silent_s(now) > patience_s for known in members
        )

    def ended(self, now: float) -> str:
        """Says so where the run is over and nobody trains any more; else empty."""
        done = [name for name, k in self.members.items() if k.member.phase == pb.PHASE_DONE]
        trains = any(not k.done and k.silent_s(now) <= LOST_AFTER_S for k in self.members.values())
        return f"the run is over: {min(done)} is done" if done and not trains else ""

    def status(self, now: float) -> dict[str, object]:
        """The document that `murmur status` shows."""
        members = [known for _, known in sorted(self.members.items())]
        staged = any(known.member.stage > 0 for known in members)
        rows = [
            {
                "peer": known.member.peer,
                **({"stage": known.member.stage} if staged else {}),
                "address": known.member.address,
                "health": known.health(now),
                "phase": _PHASES.get(known.member.phase, "unknown"),
                "step": known.member.step,
                "versions": [digest.version for digest in known.member.digests],
                "heard_s_ago": round(known.silent_s(now), 1),
            }
            for known in members
        ]
        refused = dict(self.refused)
        return {"kind": "coordinator", "run": self.run, "members": rows, "refused": refused}

    def _refusal(self, member: pb.Member, manifest: bytes, now: float) -> str:
        """Why this caller is turned away; empty: welcome."""
        if member.start_ms > MAX_START_MS:
            return "bad member: its start cannot be"
        try:
            for name in (member.peer, member.address):
                check_name(name, BadDocument)
            check_address(member.address, member.peer)
        except ValueError as error:
            return f"bad member: {error}"
        if len(member.profile) > PROFILE_BYTES or member.ByteSize() > 3 * PROFILE_BYTES:
            return f"bad member: {member.ByteSize()} bytes; no worker would believe it"
        if self.manifest and manifest:
            if difference := manifest_difference(self.manifest, manifest):
                return difference
        elif manifest:
            try:
                self.run = run_name(manifest)
            except BadDocument as error:
                return f"the manifest cannot be read: {error}"
            self.manifest = manifest
        if member.peer not in self.members and len(self.members) >= MAX_MEMBERS:
            silent = max(self.members.values(), key=lambda known: known.silent_s(now))
            if silent.silent_s(now) <= LOST_AFTER_S:
                return f"full: {MAX_MEMBERS} workers are here"
            del self.members[silent.member.peer]
        return ""
