"""When NoLoCo's replicas come together: the exact recursion of their second moments.

Take many replicas in random groups of n, and one coordinate of each: anchor phi and outer momentum
delta, both counted from the mean over all replicas. A round does

    delta_i <- a*delta_i - drive*m - c*(phi_i - m);   phi_i <- phi_i + delta_i

where m is the mean phi of its group, and `drive` is b times the share of the way to the optimum
that local steps go, so that b times the mean pseudo-gradient is drive*m: 0 where the loss is flat,
b where local steps converge. Before the round the members of a group are independent, with
P = E phi^2, X = E phi*delta and D = E delta^2 each. So E (phi_i - m)^2 = qP with q = (n-1)/n,
E m^2 = P/n, m and phi_i - m are uncorrelated, and with r = qc + drive/n, s = q*c^2 + drive^2/n:

    D' = a^2 D - 2ar X + s P;   X' = aX - rP + D';   P' = P + 2(aX - rP) + D'

The map takes covariance matrices to covariance matrices, so its spectral radius is itself an
eigenvalue, and it is 1 exactly where s(1 + a) = 2r(1 - a^2) + 2a r^2. The limits below are that
equation, solved for c and for b.

Without drive, a swarm of N replicas follows the same recursion with q*N/(N - 1) for q, which allows
more.

Ref: arXiv:2506.10911 eq. 2; its bound on gamma (our c) differs: `paper_bounds`.
"""

import math

import numpy as np
from numpy.typing import NDArray


def second_moments(a: float, c: float, size: int = 2, drive: float = 0.0) -> NDArray[np.float64]:
    """The 3x3 matrix that takes (P, X, D) to those of the next round."""
    q = (size - 1) / size
    return _moments(a, q * c + drive / size, q * c * c + drive * drive / size)


def spectral_radius(a: float, c: float, size: int = 2, drive: float = 0.0) -> float:
    """By how much the variance of the replicas grows a round, in the long run; below 1 is stable.

    Args:
        a: outer momentum.
        c: pull towards the group's mean anchor.
        size: peers in a group, at least 2.
        drive: 0 for the replicas by themselves, b for the replicas in a bowl whose bottom the
            local steps reach.
    """
    return _radius(second_moments(a, c, size, drive))


def mean_spectral_radius(a: float, drive: float) -> float:
    """The same of the mean over all replicas, which is heavy ball: by how much its square grows."""
    return _radius(_moments(a, drive, drive * drive))


def largest_stable_step(a: float) -> float:
    """The limit that b must stay below for that mean, in a bowl whose bottom local steps reach."""
    return 2 * (1 + a)


def shared_spectral_radius(a: float, size: int = 2, drive: float = 0.0) -> float:
    """`spectral_radius` where a group shares anchor and momentum: each of its members ends a round
    with one heavy-ball step of the group's mean, whose deviation from the mean over all replicas
    has 1/size of a member's second moments. Where the mean does not diverge, neither do they.

    Ref: docs/adr/0013.
    """
    return mean_spectral_radius(a, drive) / size


def largest_stable_c(a: float, size: int = 2) -> float:
    """The limit that c must stay below, for 0 <= a < 1; without drive.

    2(1 - a^2) for pairs; it grows with the group, to 2(1 + a) where all are in one.
    """
    q = (size - 1) / size
    return 2 * (1 - a * a) / (1 + a - 2 * a * q)


def largest_stable_b(a: float, c: float, size: int = 2) -> float:
    """The limit that b must stay below, for 0 <= a < 1 and a stable c.

    Two things can diverge in a bowl whose bottom the local steps reach: the mean of all replicas,
    which is heavy ball with step b and needs b < 2(1 + a), and the replicas around it. A part of
    the way (a smaller drive) is stable if none and all of it are: the condition is concave in it.
    """
    q = (size - 1) / size
    square = (1 + a) / size - 2 * a / size**2
    linear = -2 * (1 - a * a) / size - 4 * a * c * q / size
    constant = c * c * q * (1 + a) - 2 * c * q * (1 - a * a) - 2 * a * (c * q) ** 2
    root = (-linear + math.sqrt(linear * linear - 4 * square * constant)) / (2 * square)
    return min(root, largest_stable_step(a))


def paper_bounds(a: float, size: int = 2) -> tuple[float, float]:
    """What the paper asks of its gamma: above the first, below the second. Not safe.

    sqrt(n/(2(n-1))) * a < c < sqrt(n/(2(n-1)) * (2 + a^2)). For pairs the upper one meets the exact
    limit at a = 0.5 only: beyond, it admits what diverges (all that it admits at a = 0.9). The
    lower one refuses what is stable.
    """
    factor = size / (2 * (size - 1))
    return math.sqrt(factor) * a, math.sqrt(factor * (2 + a * a))


def _moments(a: float, r: float, s: float) -> NDArray[np.float64]:
    to_delta = np.array([s, -2 * a * r, a * a])
    to_product = to_delta + np.array([-r, a, 0.0])
    to_phi = to_product + np.array([1 - r, a, 0.0])
    return np.array([to_phi, to_product, to_delta])


def _radius(matrix: NDArray[np.float64]) -> float:
    return float(np.abs(np.linalg.eigvals(matrix)).max())
