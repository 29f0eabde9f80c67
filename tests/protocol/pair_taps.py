"""Runs of peers in pairs, each step of which takes half a second, what has come of them, and taps
on their streams, which know which part a frame belongs to."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from murmuration.algorithms.plan import PRESETS, Plan
from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker.exchange.pairwise.round import ANCHOR, CONTRIBUTION
from tests.protocol.problem import Problem
from tests.protocol.swarm import Peer, Swarm
from tests.protocol.taps import Passing, Tap

PARTS = {ANCHOR: "anchor", CONTRIBUTION: "contribution"}


@dataclass(frozen=True)
class GossipMessage:
    """A message between two partners, from `speaker` to `listener`.

    `kind` is header, prepared or refusal, or says of a part whether it is announced ("anchor part")
    or a frame of it ("anchor frame")."""

    speaker: str
    listener: str
    kind: str
    message: pb.PairMessage

    @property
    def ends(self) -> frozenset[str]:
        return frozenset((self.speaker, self.listener))


def meetings(act: Callable[[GossipMessage], bytes | None]) -> Tap:
    """A tap that shows what partners say; what `act` returns, unless None, passes instead."""
    parts: dict[tuple[str, str, bool], int] = {}

    def tap(passing: Passing) -> bytes:
        if passing.method != "Data/PairRound":
            return passing.message
        message = pb.PairMessage.FromString(passing.message)
        kind = message.WhichOneof("body") or ""
        direction = (passing.source, passing.target, passing.up)
        if kind == "part":
            parts[direction] = message.part.part
        if kind in ("part", "frame"):
            kind = f"{PARTS[parts.get(direction, ANCHOR)]} {kind}"
        ends = (passing.source, passing.target)
        speaker, listener = ends if passing.up else ends[::-1]
        changed = act(GossipMessage(speaker, listener, kind, message))
        return passing.message if changed is None else changed

    return tap


def first(
    what: Callable[[GossipMessage], bool], act: Callable[[GossipMessage], bytes | None]
) -> Tap:
    """Acts on the first message for which `what` holds."""
    done: list[GossipMessage] = []

    def each(said: GossipMessage) -> bytes | None:
        if done or not what(said):
            return None
        done.append(said)
        return act(said)

    return meetings(each)


NOLOCO = replace(PRESETS["noloco"], inner_steps=5, consensus=False)
SLOW = replace(NOLOCO, inner_steps=20)  # a period is longer than a death takes to be noticed


def steady(steps: int, plan: Plan = NOLOCO, seed: int = 0) -> Problem:
    step_s = dict.fromkeys("abcdefgh", 0.5)
    return Problem(layers=(300, 200), plan=plan, steps=steps, step_s=step_s, seed=seed)


def rounds_of(peer: Peer) -> list[object]:
    return [event["round"] for event in peer.of_kind("round")]


def failures_of(peer: Peer) -> list[object]:
    return [event["round"] for event in peer.of_kind("round_failed")]


def in_round(swarm: Swarm, round_: int, kind: str) -> Callable[[GossipMessage], bool]:
    """A message of that kind in everyone's round `round_`, which has begun at the speaker."""
    return lambda said: said.kind == kind and swarm[said.speaker].versions[0] == round_
