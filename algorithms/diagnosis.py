"""Which peer or link slows the rounds, found by comparing what peers have measured.

A rate is the receiver's word: how fast a payload of a round came in from one sender. If nearly all
receivers see a sender slow, it is the sender's uplink; if one receiver sees nearly all senders
slow, it is that one's downlink; if only one pair is slow, it is the link between the two. A machine
is slow by the time of its inner steps, a disk by that of a checkpoint (docs/adr/0025). The median
over the others is usual, the milder of two middle ones: so one peer's word moves nothing.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median, median_high, median_low
from typing import Literal

Kind = Literal["uplink", "downlink", "link", "machine", "disk"]

_SIDES: tuple[tuple[int, Kind], ...] = ((0, "uplink"), (1, "downlink"))  # of (sender, receiver)
MOST_OF = 0.75  # of the receivers that must see a sender slow, or of the senders
_EXPLAINS = 0.5  # of two directions of a peer, one that is so much worse explains the other
_BUSY = 1.3  # times the usual step: such a machine also sends and takes slowly
_DISK_S = 0.5  # longer than usual: less is nothing to speak of
_LEAST_SAVES = 2
MEDIAN_OF = 5  # rounds, are the figures of links and steps
_HOLD_S, _HOLD_ROUNDS, _HOLD_SAVES = 10.0, 4, 2


@dataclass(frozen=True, kw_only=True)
class Limits:
    """From where on something is a fault."""

    rate: float  # of a link: less than this share of the usual
    step: float  # so many times the usual
    save: float  # likewise
    cost: float  # and it is worth this share of the rounds


FOUND = Limits(rate=0.5, step=1.5, save=4.0, cost=0.02)
KEPT = Limits(rate=0.67, step=1.25, save=2.0, cost=0.01)  # of one that is known already


@dataclass(frozen=True, kw_only=True)
class PeerFigures:
    """The measurements of a peer, medians over its last rounds; None is not known."""

    peer: str
    rounds: int = 0  # how many there have been
    round_s: float | None = None  # from the end of one round to that of the next
    stall_s: float | None = None  # of it, stood still
    step_s: float | None = None  # an inner step's computing
    steps: float = 0.0  # from round to round
    saves: int = 0  # how many checkpoints there have been
    save_s: float | None = None  # writing a checkpoint
    # By sender, (Mbit/s while something of its came, seconds of that a round).
    received: Mapping[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True, order=True)
class FaultPlace:
    """Where a fault is. Args: to: of a link, the receiver; else empty."""

    kind: Kind
    peer: str
    to: str = ""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One fault."""

    place: FaultPlace
    measured: float  # Mbit/s of a link, or seconds of a step or a checkpoint
    usual: float
    cost: float  # the share of the rounds' time that the others lose by it, 0 of a disk
    since_s: float = 0.0  # when it was first seen, by the caller's clock


def diagnose(
    swarm: Sequence[PeerFigures], *, in_turn: bool, known: Collection[FaultPlace] = ()
) -> list[Verdict]:
    """The faults now; for peers that train the same. With `in_turn` a peer sends to one at a time,
    as in pairs. Faults that are `known` are kept until they are clearly gone."""
    look = _Look({each.peer: each for each in swarm}, in_turn, known)
    ways = look.ways()
    return [*ways, *look.links(ways), *look.machines(), *look.disks()]


class _Look:
    """One look at the swarm. Args: as `diagnose`, the peers by name."""

    def __init__(
        self, swarm: Mapping[str, PeerFigures], in_turn: bool, known: Collection[FaultPlace]
    ) -> None:
        self._swarm, self._in_turn, self._known = swarm, in_turn, known
        self._rates = {
            (sender, receiver): came
            for receiver, figures in swarm.items()
            for sender, came in figures.received.items()
            if sender in swarm and sender != receiver
        }
        rounds_s = [each.round_s for each in swarm.values() if each.round_s]
        self._round_s = median(rounds_s) if rounds_s else 0.0
        # Its steps take so long that a machine sends and takes slowly, too.
        self._busy = {
            peer
            for peer, each in swarm.items()
            if (usual_s := self._usual(peer, "step_s")) and (each.step_s or 0.0) / usual_s > _BUSY
        }

    def ways(self) -> list[Verdict]:
        """Slow uplinks and downlinks."""
        found = []
        for peer in self._swarm:
            if peer in self._busy:
                continue
            judged = [self._way(peer, side, FaultPlace(kind, peer)) for side, kind in _SIDES]
            slow = [each for each in judged if each is not None]
            worst = min((share for share, _ in slow), default=0.0)
            found += [verdict for share, verdict in slow if _EXPLAINS * share <= worst]
        return found

    def _way(self, peer: str, side: int, place: FaultPlace) -> tuple[float, Verdict] | None:
        """(share of the usual rate, verdict) of a peer's uplink (side 0) or downlink (1)."""
        own = [came for pair, came in self._rates.items() if pair[side] == peer]
        others = [came for pair, came in self._rates.items() if peer not in pair]
        if len(own) < 2 or not others:
            return None
        (usual_mbps, usual_s), limits = median_low(others), self._limits(place)
        slow = sum(mbps < limits.rate * usual_mbps for mbps, _ in own)
        if slow < MOST_OF * len(own):
            return None
        excess_s = median(s for _, s in own) - usual_s
        cost = self._cost(peer, excess_s)
        if cost < limits.cost:
            return None
        rates = [self._whole(each, side) for each in self._swarm if each != peer]
        verdict = Verdict(
            place=place,
            measured=self._whole(peer, side) or 0.0,
            usual=median(rate for rate in rates if rate is not None),
            cost=cost,
        )
        return median(mbps for mbps, _ in own) / usual_mbps, verdict

    def _whole(self, peer: str, side: int) -> float | None:
        """Mbit/s of all that a peer sends (side 0) or receives (1) at a time."""
        if not (own := [mbps for pair, (mbps, _) in self._rates.items() if pair[side] == peer]):
            return None
        return median(own) if self._in_turn else fmean(own) * (len(self._swarm) - 1)

    def links(self, ways: Iterable[Verdict]) -> list[Verdict]:
        """Slow links between two peers, which no slow uplink, downlink or machine explains."""
        slow, found = {(each.place.kind, each.place.peer) for each in ways}, []
        for (sender, receiver), (mbps, seconds) in self._rates.items():
            explained = ("uplink", sender) in slow or ("downlink", receiver) in slow
            if explained or not self._busy.isdisjoint((sender, receiver)):
                continue
            pair = (sender, receiver)
            if not (others := [came for other, came in self._rates.items() if other != pair]):
                continue
            usual_mbps, usual_s = median_low(others)
            place = FaultPlace("link", *pair)
            cost, limits = self._cost(sender, seconds - usual_s), self._limits(place)
            if mbps < limits.rate * usual_mbps and cost >= limits.cost:
                found.append(Verdict(place=place, measured=mbps, usual=usual_mbps, cost=cost))
        return found

    def machines(self) -> list[Verdict]:
        """Slow machines, by their inner steps."""
        found = []
        for peer, figures in self._swarm.items():
            place, step_s = FaultPlace("machine", peer), figures.step_s
            usual_s, limits = self._usual(peer, "step_s"), self._limits(place)
            if usual_s is None or step_s is None:
                continue
            cost = self._cost(peer, (step_s - usual_s) * figures.steps)
            if step_s >= limits.step * usual_s and cost >= limits.cost:
                found.append(Verdict(place=place, measured=step_s, usual=usual_s, cost=cost))
        return found

    def disks(self) -> list[Verdict]:
        """Slow disks, by the time of a checkpoint, which costs nobody else anything."""
        found = []
        for peer, figures in self._swarm.items():
            place, save_s = FaultPlace("disk", peer), figures.save_s
            usual_s, limit = self._usual(peer, "save_s"), self._limits(place).save
            if usual_s is None or save_s is None or figures.saves < _LEAST_SAVES:
                continue
            if save_s > max(limit * usual_s, usual_s + _DISK_S):
                found.append(Verdict(place=place, measured=save_s, usual=usual_s, cost=0.0))
        return found

    def _limits(self, place: FaultPlace) -> Limits:
        return KEPT if place in self._known else FOUND

    def _usual(self, peer: str, name: str) -> float | None:
        """The median over the others."""
        values = [getattr(each, name) for each in self._swarm.values() if each.peer != peer]
        known = [value for value in values if value is not None]
        return median_high(known) if known else None

    def _cost(self, peer: str, excess_s: float) -> float:
        """The share of a round that others lose by this: they wait for no longer than they wait."""
        others = (each for each in self._swarm.values() if each.peer != peer)
        stalls_s = [each.stall_s for each in others if each.stall_s is not None]
        if not stalls_s or self._round_s <= 0:
            return 0.0
        return max(0.0, min(excess_s, fmean(stalls_s))) / self._round_s


@dataclass
class _Case:
    """A fault from first sight `at` this evidence; `well`: when (s, evidence) it had gone."""

    verdict: Verdict
    at: int
    found: bool = False
    well: tuple[float, int] | None = None


class Diagnosis:
    """The faults of a swarm over time: each must last before it counts, and be gone as long: for 10
    s and four rounds of the peer's, of a disk for two checkpoints. Of its own links a peer believes
    it at the second look, once there are `MEDIAN_OF` rounds: others wait for it until then."""

    def __init__(self, own: str = "", *, in_turn: bool) -> None:
        self._own, self._in_turn = own, in_turn
        self._cases: dict[FaultPlace, _Case] = {}

    @property
    def verdicts(self) -> list[Verdict]:
        """Those that hold, the most costly first."""
        found = [case.verdict for case in self._cases.values() if case.found]
        return sorted(found, key=lambda verdict: (-verdict.cost, verdict.place))

    def update(self, now_s: float, swarm: Sequence[PeerFigures]) -> list[tuple[Verdict, bool]]:
        """Takes a look at time `now_s`. Returns what has changed: whether a fault was found, or has
        gone."""
        known = [place for place, case in self._cases.items() if case.found]
        seen = {each.place: each for each in diagnose(swarm, in_turn=self._in_turn, known=known)}
        by_name, changes = {each.peer: each for each in swarm}, []
        for place in dict.fromkeys((*self._cases, *seen)):
            case, verdict = self._cases.get(place), seen.get(place)
            figures, disk = by_name.get(place.peer), place.kind == "disk"
            evidence = 0 if figures is None else figures.saves if disk else figures.rounds
            least = _HOLD_SAVES if disk else _HOLD_ROUNDS
            if verdict is not None and (case is None or evidence < case.at):
                self._cases[place] = _Case(replace(verdict, since_s=now_s), evidence)
                if case is not None and case.found:  # the peer has begun anew
                    changes.append((case.verdict, False))
                continue
            assert case is not None, "it was seen now or before"
            if verdict is not None:
                since_s = case.verdict.since_s
                case.verdict, case.well = replace(verdict, since_s=since_s), None
                lasts = now_s - since_s >= _HOLD_S and evidence - case.at >= least
                if place.peer == self._own and place.kind in ("uplink", "downlink"):
                    lasts = lasts or evidence >= MEDIAN_OF
                if lasts and not case.found:
                    case.found = True
                    changes.append((case.verdict, True))
                continue
            if case.found and figures is not None:
                if case.well is None or evidence < case.well[1]:
                    case.well = (now_s, evidence)
                well_s, at = case.well
                if now_s - well_s < _HOLD_S or evidence - at < least:
                    continue
            del self._cases[place]
            if case.found:
                changes.append((case.verdict, False))
        return changes
