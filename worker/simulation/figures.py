"""What a simulated run has shown, in numbers."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Of one run.

    Args:
        peers: at the beginning; `unfinished` of them lived, and did not come to the end.
        sync_median_s, sync_mean_s, sync_p99_s: time of a round, from a peer's last inner step to
            its new anchor, of the rounds in which it exchanged something; None if there was none.
        pair_model_s, tree_model_s: what the paper's latency model and the link's rate say of a
            pair, and of an all-reduce over a tree; see `run.predictions`.
        idle_share: of the peers' time, spent in rounds.
        spread: root mean square distance of the live peers' anchors from their mean, over its norm.
        distance: of that mean from the optimum; 1 at the beginning.
        rounds, rounds_failed: of all peers together; `reasons` of the failed ones, most frequent
            first.
        half_applied: meetings that some of the group have applied and others not.
        bytes_per_round: sent by a peer in a round.
        virtual_s: how long the run would have taken.
        events: that were simulated.
    """

    peers: int
    sync_median_s: float | None
    sync_mean_s: float | None
    sync_p99_s: float | None
    pair_model_s: float | None
    tree_model_s: float | None
    idle_share: float
    spread: float
    distance: float
    rounds: int
    rounds_failed: int
    reasons: dict[str, int]
    half_applied: int
    bytes_per_round: float
    unfinished: int
    virtual_s: float
    events: int


def percentile(values: list[float], share: float) -> float | None:
    """The smallest of the values that so large a share of them does not exceed; None of none."""
    return sorted(values)[math.ceil(share * len(values)) - 1] if values else None
