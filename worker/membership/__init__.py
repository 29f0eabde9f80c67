"""Who is in the swarm: what peers gossip about a peer, and which of two records is newer."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

from murmuration.protos.documents import MAX_START_MS

MAX_UNREACHABLE = 16  # peers that one member names
MAX_FRAGMENTS = 1024
MAX_HEARTBEAT = 2**53
MAX_INCARNATION = 2**31
_FINAL_ROUNDS = 2  # the mean that ends a run in pairs, or the exact one
_WINDOW_S, _SAMPLE_S = 60.0, 1.0
_FASTER = 16
_SLACK_ROUNDS = 4  # between what is gossiped and what is so
_AHEAD_OF_GOSSIP = 256  # rounds between what a donor has announced and what it gives


class Health(IntEnum):
    """Ordered: of two rumours with the same incarnation the higher wins."""

    ALIVE = 0
    SUSPECT = 1
    DEAD = 2
    LEFT = 3


class Phase(IntEnum):
    STARTING = 0  # known, but has no model yet
    READY = 1  # waits for the swarm to be complete enough to start
    TRAINING = 2
    DONE = 3  # trained to the end; still answers
    LEAVING = 4  # its loop has ended before the run's last step; still answers


@dataclass(frozen=True)
class Digest:
    """The committed state of one fragment, in short."""

    version: int  # the next round that the peer contributes to
    contributors: int  # of the latest round
    hash: int


@dataclass(frozen=True)
class Signed:
    """The words of a peer about itself, as it wrote them, and its signature."""

    words: bytes
    signature: bytes


@dataclass(frozen=True)
class Member:
    """One peer as the others know it."""

    peer: str
    address: str
    start_ms: int  # the start of its process in ms; a restart has a later one
    incarnation: int = 0  # raised by the peer itself to refute a suspicion
    health: Health = Health.ALIVE  # ours, whatever is signed
    phase: Phase = Phase.STARTING
    # Raised by itself when phase or a later field changes; may be newer than signed, as may `step`.
    heartbeat: int = 0
    step: int = 0
    step_s: float = 0.0  # the duration of an inner step, 0 when unknown
    stage: int = 0
    profile: bytes = b""  # its measurements for the stage that it serves, as they travel
    unreachable: tuple[str, ...] = ()  # live peers that it cannot reach
    # Those that its rounds have waited for in vain, or that gave it false means; itself where it
    # does not keep up.
    idle: tuple[str, ...] = ()
    waited_for: str = ""  # the last partner that was late for a pair round of its own
    waited_at: int = 0  # the version which that one was at when the round began
    digests: tuple[Digest, ...] = ()
    signed: Signed | None = field(default=None, repr=False)  # the peer's own words

    @property
    def live(self) -> bool:
        return self.health < Health.DEAD

    @property
    def version(self) -> int:
        """The furthest of its fragments'."""
        return max((digest.version for digest in self.digests), default=0)


@dataclass(kw_only=True)
class MemberLimits:
    """Limits what a peer of this run can truly say of a member. Anything beyond is a mistake or a
    lie, and would stay: of two records the later start, incarnation and heartbeat win.

    This peer's own pace tells how far others can be: nobody is `_FASTER` times as fast as this peer
    has ever been in the window."""

    steps: int
    fragments: int  # of this peer's stage
    inner_steps: int  # H of the plan
    stages: int = 1
    stage: int = 0
    _taken: deque[tuple[float, int]] = field(default_factory=deque, init=False)  # when, which step
    _fastest_s: float = field(default=math.inf, init=False)

    def problem(self, member: Member) -> str | None:
        """Why the member cannot be, if it cannot."""
        if member.start_ms > MAX_START_MS:
            return f"start_ms {member.start_ms}, at most {MAX_START_MS}"
        if member.incarnation > MAX_INCARNATION:
            return f"incarnation {member.incarnation}, at most {MAX_INCARNATION}"
        if member.stage >= self.stages:
            return f"stage {member.stage} of {self.stages}"
        count, same = len(member.digests), member.stage == self.stage
        if count not in (0, self.fragments) if same else count > MAX_FRAGMENTS:
            return f"{count} fragments, of {self.fragments}"
        version = max((digest.version for digest in member.digests), default=0)
        if version > self.steps + _FINAL_ROUNDS:
            return f"version {version} in a run of {self.steps} steps"
        return self.progress_problem(member.heartbeat, member.step)

    def progress_problem(self, heartbeat: int, step: int) -> str | None:
        if heartbeat > MAX_HEARTBEAT:
            return f"heartbeat {heartbeat}, at most {MAX_HEARTBEAT}"
        return f"step {step} of {self.steps}" if step > self.steps else None

    def takes(self, step: int, step_s: float, now: float) -> None:
        """This peer is at this step, at `now` (monotonic, s). Args: step_s: 0: not known."""
        if step_s > 0:
            self._fastest_s = min(self._fastest_s, step_s)
        if not self._taken or now >= self._taken[-1][0] + _SAMPLE_S:
            self._taken.append((now, step))
        while len(self._taken) > 1 and self._taken[1][0] <= now - _WINDOW_S:
            self._taken.popleft()

    def can_be_at(self, member: Member, mine: Sequence[Digest], now: float) -> bool:
        if not self._taken or self._fastest_s == math.inf:
            return True
        began, at = self._taken[0]
        steps = _SLACK_ROUNDS * self.inner_steps + _FASTER * (now - began) / self._fastest_s
        rounds = steps / self.inner_steps
        return member.step - at <= steps and all(
            theirs.version - my.version <= rounds
            for theirs, my in zip(member.digests, mine, strict=False)
        )

    def can_follow(self, version: int, announced: int) -> bool:
        """Tells whether a peer that has announced version `announced` can give `version`."""
        return version <= min(announced + _AHEAD_OF_GOSSIP, self.steps + _FINAL_ROUNDS)


def newest(known: Member, heard: Member) -> Member:
    """Merges two records of one peer: health by incarnation, the rest by heartbeat. A later start
    replaces all. One that left stays gone until its next start."""
    if known.start_ms != heard.start_ms:
        return max(known, heard, key=lambda member: member.start_ms)
    fields = heard if heard.heartbeat > known.heartbeat else known
    incarnation, health = max((known.incarnation, known.health), (heard.incarnation, heard.health))
    if Health.LEFT in (known.health, heard.health):
        health = Health.LEFT
    if (fields.incarnation, fields.health) == (incarnation, health):
        return fields
    return replace(fields, incarnation=incarnation, health=health)
