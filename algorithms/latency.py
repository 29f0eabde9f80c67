"""NoLoCo's latency model: what a pair costs, what a tree all-reduce costs, and what waiting costs.

No message has a size here: one takes a lognormal time, whoever sends it to whom. `spread` is the
standard deviation of that time over its mean t_c.

Ref: arXiv:2506.10911, the section on latency.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]


@dataclass(frozen=True)
class MessageTime:
    """The time of one message, LogNormal(mu, s^2).

    Args:
        mean_s: t_c = exp(mu + s^2/2), in seconds.
        spread: standard deviation over t_c; 0 for messages that all take t_c.

    Raises:
        ValueError: no such distribution.
    """

    mean_s: float = 1.0
    spread: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mean_s) and self.mean_s > 0):
            raise ValueError(f"mean_s is {self.mean_s}; it must be above 0")
        if not (math.isfinite(self.spread) and self.spread >= 0):
            raise ValueError(f"spread is {self.spread}; it must be at least 0")

    @property
    def s(self) -> float:
        """Standard deviation of the logarithm: spread^2 = exp(s^2) - 1."""
        return math.sqrt(math.log1p(self.spread**2))

    @property
    def mu(self) -> float:
        """Mean of the logarithm."""
        return math.log(self.mean_s) - self.s**2 / 2

    def draw(self, shape: tuple[int, ...], rng: np.random.Generator) -> Times:
        """Independent times in seconds."""
        return rng.lognormal(self.mu, self.s, shape)

    @property
    def later_of_two_s(self) -> float:
        """Expected time until two messages are both there: (1 + erf(s/2)) t_c."""
        return (1 + math.erf(self.s / 2)) * self.mean_s


def pair_s(message: MessageTime) -> float:
    """Expected time of a pair's exchange: twice, each waits for the later of two messages."""
    return 2 * message.later_of_two_s


def tree_s(message: MessageTime, peers: int, runs: int, rng: np.random.Generator) -> Times:
    """Times of `runs` all-reduces over a binary tree whose leaves are the peers.

    On the way up, an inner node goes on when the messages of both its children are there; the way
    down begins at the root when the way up is done, and ends with the last leaf's message. Both
    ways are ceil(log2(peers)) levels; a node without a sibling rises by a message of its own. For
    two peers the expected time is that of a pair.

    Returns:
        Seconds, of shape (runs,).
    """
    return _rise(message, peers, runs, rng) + _rise(message, peers, runs, rng)


def _rise(message: MessageTime, peers: int, runs: int, rng: np.random.Generator) -> Times:
    """The time of one way.

    From leaves to root or from root to leaves, it is the slowest of the paths, and both are the
    same in distribution; upwards there is less to keep.
    """
    arrived: Times = np.zeros((runs, peers))
    while arrived.shape[1] > 1:
        arrived = arrived + message.draw(arrived.shape, rng)
        if arrived.shape[1] % 2:
            arrived = np.pad(arrived, ((0, 0), (0, 1)))
        arrived = arrived.reshape(runs, -1, 2).max(axis=2)
    return arrived[:, 0]


@dataclass(frozen=True)
class StepTime:
    """The time of one inner step, LogNormal(mu, variance): its logarithm has these moments.

    The paper's LogNormal(1, 0.5) is one of variance 0.5, not of standard deviation 0.5: only so do
    its ratios come out.
    """

    mu: float = 1.0
    variance: float = 0.5

    def draw(self, shape: tuple[int, ...], rng: np.random.Generator) -> Times:
        """Independent times in seconds."""
        return rng.lognormal(self.mu, math.sqrt(self.variance), shape)


def blocking_ratio(
    step: StepTime, peers: int, inner_steps: int, rounds: int, rng: np.random.Generator
) -> float:
    """How much longer training takes when all wait for all than when each waits for a partner.

    Messages take no time. Each round every peer takes its inner steps; then either nobody goes on
    before the slowest of all has arrived, or each before its partner of a random pairing has,
    whose lag it thereby hands on. Both see the same step times. With an odd count one peer waits
    for nobody.

    Returns:
        The ratio of the two times at which the last peer ends its last round. Beyond a hundred
        rounds or so it no longer depends on their number.
    """
    all_wait_s = 0.0
    clock_s: Times = np.zeros(peers)
    for _ in range(rounds):
        taken_s = step.draw((inner_steps, peers), rng).sum(axis=0)
        all_wait_s += float(taken_s.max())
        clock_s = clock_s + taken_s
        order = rng.permutation(peers)
        left, right = order[: peers // 2], order[peers // 2 : peers // 2 * 2]
        clock_s[left] = clock_s[right] = np.maximum(clock_s[left], clock_s[right])
    return all_wait_s / float(clock_s.max())
