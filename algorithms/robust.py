"""How much one peer can move a mean of many: contributions are held to the others' norms.

A contribution of more than `limit` medians counts as far as that. A mean of two is taken as it is.
Beside a contribution of more inner steps, one of fewer stands for so many times its norm: norms
grow no faster than work, which is a peer's word.

Ref: arXiv:2508.15706 (SparseLoCo) scales every contribution to the median norm; arXiv:1803.01498
for the trimmed mean.
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median_high
from typing import Literal

import torch
from torch import Tensor

from murmuration.algorithms.diloco import MeanOver, mean_in_order

Aggregation = Literal["mean", "trimmed"]
AGGREGATIONS: tuple[Aggregation, ...] = ("mean", "trimmed")

NORM_LIMIT = 3.0  # medians
_LEAST_LIMIT = 1.5
_FEWEST = 3  # contributions that have a median
NORM_SLACK = 2.0  # an encoding may enlarge a mean's norm
_LARGEST = 16.0  # times the usual norm that an earlier one may have
FAR = 10.0  # times the median: no honest contribution of equal work has that
_STRIKES = 3
_MOST_STRIKES = 12
_MOST_DOUBLED = 16  # times
_ENOUGH = 3  # others that a peer disagrees with
_LASTING = 3  # checks, or rounds
_LATELY = 8  # rounds, or checks
COMPARED = 16_384  # values of a shard, drawn by its reducer; a sixteenth has a direction
_ALONG = 0.03  # the mean cosine of each two others: honest peers have 0.08 and more
_SMALL = 0.25  # medians
_AGAINST = -0.15  # a cosine: the liar of 16 has -0.26, an honest peer 0.2 and more
_TAKES_BACK = 0.15  # of the others' sum: other text has 0.1, what is turned 0.2 and more


def norm(values: Tensor) -> float:
    """The Euclidean norm of values of any shape on the CPU: in fp32 the same on any machine."""
    blocks = torch.split(values.reshape(-1), 256 * 1024)
    return norm_of_parts([float(each.double().norm()) for each in blocks])


def norm_of_parts(norms: Sequence[float]) -> float:
    """The norm in fp32 of values whose parts have these."""
    return torch.tensor(math.hypot(*norms), dtype=torch.float32, device="cpu").item()


def usual_norm(norms: Sequence[float], works: Sequence[int], own: int) -> float:
    """The lower median of the norms, for as much work as `own`; 0 of fewer than three."""
    like = sorted(each * max(1.0, own / work) for each, work in zip(norms, works, strict=True))
    return like[(len(like) - 1) // 2] if len(like) >= _FEWEST else 0.0


def norm_ratios(norms: Sequence[float], works: Sequence[int] = ()) -> tuple[float, ...]:
    """Each norm over its usual one; 1 where that is 0. Args: works: the inner steps of each, of
    which the most count as the second most."""
    works = works or (1,) * len(norms)
    most = max(sorted(works)[:-1], default=1)
    usual = {own: usual_norm(norms, works, own) for own in {most, *works} if own <= most}
    of = (usual[min(each, most)] for each in works)
    return tuple(each / one if one else 1.0 for each, one in zip(norms, of, strict=True))


def limit_of(limit: float, contributions: int) -> float:
    """The limit that holds in a mean of so many, in medians, at least 1 (0 is none): in a small one
    half of the others together, so that one peer takes back at most half of what they learned."""
    return min(limit, max(_LEAST_LIMIT, (contributions - 1) / 2))


def norm_factors(ratios: Sequence[float], limit: float) -> tuple[float, ...]:
    """The factor of each contribution, at most 1: none counts more medians than the limit."""
    limit = limit_of(limit, len(ratios))
    return tuple(limit / ratio if 0 < limit < ratio else 1.0 for ratio in ratios)


def most_norm(
    norms: Sequence[float], works: Sequence[int], missing: int, limit: float, period: int
) -> float:
    """The largest norm of a mean of contributions with these norms and of `missing` more, as large
    as the limit lets them be; two may have a period's work. Infinite where it cannot be told."""
    factors = norm_factors(norm_ratios(norms, works), limit)
    known = max((each * factor for each, factor in zip(norms, factors, strict=True)), default=0.0)
    if not missing:
        return known if norms else math.inf
    work = max(works, default=1) if missing == 1 else period
    most = limit_of(limit, len(norms) + missing) * usual_norm(norms, works, work)
    return max(known, most) if most > 0 else math.inf


def least_factor(own: float, norms: Sequence[float], missing: int, limit: float) -> float:
    """The least factor that a contribution of norm `own` can have in a mean of contributions with
    these norms, its own among them, and `missing` more, whatever the work behind them; 0 where it
    cannot be told."""
    known = [0.0] * missing + list(norms)
    usual = usual_norm(known, (1,) * len(known), 1)
    if own == 0 or usual == 0:
        return 0.0
    return min(1.0, limit_of(limit, len(known)) * usual / own) if limit else 1.0


def taken_out(factor: float) -> float:
    """The share of a contribution that a replica takes out of its parameters, where it keeps the
    rest: what was not counted is kept, as far as it is no more than what was."""
    return max(factor, 1 - factor)


class Quarantine:
    """The peers whose contributions have been far too large again and again, and the `liars`. Three
    such rounds put a peer in; each ordinary one takes a strike back, so that a peer that was in for
    long is out after twelve. A liar, which gave a false mean, is in for twelve ordinary rounds at
    once, and for twice as many each time."""

    def __init__(self) -> None:
        self._strikes: dict[str, int] = {}
        self._seen: dict[int, int] = {}
        self._lied: Counter[str] = Counter()
        self.peers: frozenset[str] = frozenset()
        self.liars: frozenset[str] = frozenset()

    def caught(self, peer: str) -> bool:
        """The peer gave a false mean. Returns whether that is news."""
        if peer in self.liars:
            return False
        self._strikes[peer] = _MOST_STRIKES << min(self._lied[peer], _MOST_DOUBLED)
        self._lied[peer] += 1
        self.peers, self.liars = self.peers | {peer}, self.liars | {peer}
        return True

    def saw(
        self, fragment: int, round_: int, ratios: Mapping[str, float], kept: float = 0.0
    ) -> None:
        """Takes the norm ratios of a round, whichever of its shards they come with first; `kept`:
        the medians by which a contribution may be larger, of what its replica has kept."""
        if self._seen.get(fragment, -1) >= round_:
            return
        self._seen[fragment] = round_
        for peer, ratio in ratios.items():
            before = self._strikes.get(peer, 0)
            strikes = before + (1 if ratio > FAR + kept else -1)
            self._strikes[peer] = min(max(before, _MOST_STRIKES), max(0, strikes))
            if self._strikes[peer] >= _STRIKES:
                self.peers |= {peer}
            elif not self._strikes[peer]:
                del self._strikes[peer]
                self.peers, self.liars = self.peers - {peer}, self.liars - {peer}


class UsualNorms:
    """The norms of contributions lately, by fragment or part of one: a peer's own, and others' as
    far as they count. At least a part of its largest, so that two that have learned all meet."""

    def __init__(self) -> None:
        self._lately = defaultdict[object, deque[float]](lambda: deque(maxlen=2 * _LATELY))
        self._largest = defaultdict[object, float](float)

    def saw(self, of: object, norms: Iterable[float], own: float) -> None:
        self._lately[of].extend(norms)
        self._largest[of] = max(self._largest[of], own)

    def norm(self, of: object, own: float = 0.0) -> float:
        """The usual norm, 0 where none is known. Args: own: of this peer in this round."""
        return max(own, median_high(self._lately[of] or [0.0]), self._largest[of] / _LARGEST)

    def factor(self, of: object, size: float, limit: float, own: float | None) -> float:
        """How much counts of a partner's contribution of this norm, or of the way to its anchor: up
        to `limit` usual ones (0: all). Raises ValueError: none is known yet. Args: own: at hand."""
        usual = self.norm(of, own or 0.0)
        if usual == 0 and own is None and size > 0 < limit:
            raise ValueError("no contribution is known yet")
        return min(1.0, limit * usual / size if size else 1.0) or 1.0


class Doubts:
    """The findings of checks of means, until they are enough to name a peer (docs/adr/0036): of two
    that disagree for three checks, the one that disagrees with three others, or in a small group
    with all others but one."""

    def __init__(self) -> None:
        self._hidden = defaultdict[str, deque[bool]](lambda: deque(maxlen=_LATELY))
        self._apart: Counter[tuple[str, str]] = Counter()
        self._strange: dict[tuple[str, int], set[int]] = {}

    def hides(self, peer: str, *, hidden: bool) -> bool:
        """Tells whether a peer has hidden too much by now; `hidden`: in this check, too."""
        self._hidden[peer].append(hidden)
        return sum(self._hidden[peer]) >= _LASTING

    def compared(self, peer: str, reducer: str, group: int, *, agree: bool) -> list[str]:
        """Those of the two that are caught by now; `group`: how many peers are in the round."""
        for pair in ((peer, reducer), (reducer, peer)):
            self._apart[pair] += 1
            if agree:
                del self._apart[pair]
        if agree:
            return []
        enough = max(2, min(_ENOUGH, group - 2))
        lasting = Counter(one for (one, _), times in self._apart.items() if times >= _LASTING)
        return [one for one in (peer, reducer) if lasting[one] >= enough]

    def again(self, reducer: str, fragment: int, round_: int) -> bool:
        """Tells whether a reducer has given what no honest one gives in too many rounds by now."""
        earlier = self._strange.get((reducer, fragment), set())
        rounds = {each for each in earlier if each > round_ - _LATELY} | {round_}
        self._strange[reducer, fragment] = rounds
        return len(rounds) >= _LASTING


def sampled(values: Iterable[Tensor], by: slice, sample: list[Tensor]) -> Iterator[Tensor]:
    """The values as they are; `sample` gets those of each at these places."""
    for each in values:
        sample.append(each[by].clone())
        yield each


class Directions:
    """The peers that point against the others' sum in five rounds of eight (of three: in seven),
    while those point along with each other, both also without any one of them: they have other data
    or labels, or turn what they learned. Near the optimum of unequal data no others agree."""

    def __init__(self) -> None:
        self._against = defaultdict[object, deque[set[str]]](lambda: deque(maxlen=_LATELY))

    def saw(
        self, of: object, peers: Sequence[str], samples: Sequence[Sequence[Tensor]], *factors: float
    ) -> list[tuple[str, float, bool]]:
        """Returns (peer, cosine, whether it takes back much of what three or more others learn) of
        those to tell of. Args: of: a shard; samples: by block; factors: by which each counts."""
        if not samples or len(peers) < _FEWEST:
            return []
        rows = torch.stack([*map(torch.cat, zip(*samples, strict=True))])
        norms = rows.norm(dim=1) * rows.new_tensor(factors or 1.0)
        units, others = torch.nn.functional.normalize(rows), len(peers) - 1
        median = norms.median()
        cosines = (units @ units.T).fill_diagonal_(0)
        along = cosines.sum(dim=1)
        pairs = cosines.sum() - 2 * along  # of the others, each two twice
        size = (pairs + others).clamp(min=0).sqrt()
        out, left, least = (1, others - 1, 5) if others > 2 else (0, 2, 7)  # any may seem to agree
        fewer = (pairs[:, None] - 2 * out * (along - cosines)).fill_diagonal_(math.inf).amin(dim=1)
        against = (fewer > _ALONG * left * (left - 1)) & (norms > _SMALL * median)
        against &= along < torch.minimum(_AGAINST * size, cosines.amin(dim=1))
        lately = self._against[of]
        lately.append({peers[index] for index in against.nonzero().flatten()})
        much = (along * norms < -_TAKES_BACK * median * size**2) & (others > 2)
        known = zip(peers, (along / size).tolist(), much.tolist(), strict=True)
        found = [one for one in known if sum(one[0] in each for each in lately) >= least]
        for each in lately:
            each.difference_update(peer for peer, _, _ in found)
        return found


def aggregate(
    contributions: Iterable[Tensor],
    factors: Sequence[float],
    weights: Sequence[int] | None = None,
    *,
    over: MeanOver = "all",
    aggregation: Aggregation = "mean",
) -> Tensor:
    """The mean of a round's contributions, each times its factor; otherwise as
    `mean_in_order` takes and returns them. Args: factors: of `norm_factors`, one for each;
    aggregation: `mean`; or of three or more contributions the `trimmed` mean, which takes no
    account of weights and senders."""
    pairs = zip(contributions, factors, strict=True)
    scaled = (each if factor == 1 else each * factor for each, factor in pairs)
    if aggregation == "trimmed" and len(factors) >= _FEWEST:
        return trimmed_mean(tuple(scaled))
    return mean_in_order(scaled, weights, over)


def trimmed_mean(contributions: Sequence[Tensor]) -> Tensor:
    """The mean of each value without its largest and its smallest fifth, rounded up; of three or
    more."""
    count = len(contributions)
    cut, ordered = -(-count // 5), torch.stack(tuple(contributions)).sort(dim=0).values
    return ordered[cut : count - cut].sum(dim=0).div_(count - 2 * cut)
