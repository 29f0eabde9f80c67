"""What an iteration in stages would take: the figures that docs/evidence quotes."""

import itertools

import numpy as np
import pytest

from murmuration.algorithms.skippipe.pipeline import Links
from murmuration.algorithms.skippipe.route import Rules
from tests.lab import plan_stages
from tests.lab.placement import Groups, StageCandidates, propose_placement
from tests.lab.plan_stages import Options, StagesAnswer, case_of

BY_HAND = Options(
    links=("10mbit,delay=50ms",),
    stages=2,
    replicas=1,
    skip=0.0,
    microbatches=1,
    forward_ms=100.0,
    activation_bytes=125_000,
)


@pytest.fixture(autouse=True)
def placed_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is searched for: the first peers serve stage 0."""

    def in_order(_: object, sizes: tuple[int, ...], *__: object, **___: object) -> Groups:
        peers = itertools.count()
        return tuple(tuple(itertools.islice(peers, size)) for size in sizes)

    monkeypatch.setattr(plan_stages, "propose_placement", in_order)
    monkeypatch.setattr(plan_stages, "EFFORT_S", 0.02)


def answer_to(options: Options) -> StagesAnswer:
    case = case_of(options)
    return StagesAnswer.of(case, case.proposed())


def test_times_of_visits_and_hops_add_up() -> None:
    """One peer a stage, one microbatch: 2 hops there, 2 back, of 100 ms and 50 ms each."""
    answer = answer_to(BY_HAND)
    iteration_s = 2 * 0.1 + 0.025 + 2 * 0.25 + 4 * (0.05 + 0.1)
    assert answer.iteration_s("full") == pytest.approx(iteration_s)
    shares = [0.375 / iteration_s, 0.35 / iteration_s]
    assert answer.utilization("full") == pytest.approx(shares)


def test_the_slower_rate_and_the_mean_of_the_delays_make_a_link() -> None:
    links = ("10mbit,delay=50ms", "20mbit,delay=30ms")
    answer = answer_to(Options(**vars(BY_HAND) | {"links": links}))
    assert answer.iteration_s("full") == pytest.approx(0.725 + 4 * (0.1 + 0.04))


def candidates_of(latency_s: np.ndarray, stages: int) -> StageCandidates:
    peers = len(latency_s)
    forward = np.ones((peers, stages))
    return StageCandidates(
        links=Links(latency_s=latency_s, rate_bytes_per_s=np.full((peers, peers), 1e6)),
        message_bytes=0,
        memory=(3,) * peers,
        forward_s=forward,
        backward_s=1.5 * forward,
        loss_s=0.25 * forward[:, 0],
    )


def far_from(slow: tuple[int, ...], peers: int) -> np.ndarray:
    """Ten seconds to the slow ones, a hundredth between all others."""
    far = np.isin(np.arange(peers), slow)
    return np.where(far[:, None] | far, 10.0, 0.01)


def test_peers_at_the_end_of_a_slow_line_do_not_serve_stage_0() -> None:
    """Every microbatch passes stage 0 four times, a stage that may be skipped not always."""
    candidates = candidates_of(far_from((0, 1), 6), 3)
    rules = Rules(stages=3, visited=2)
    stages = propose_placement(candidates, (2, 2, 2), rules, 3)
    assert sorted(peer for replicas in stages for peer in replicas) == list(range(6))
    assert stages[0] != (0, 1)
    assert not {0, 1} & set(stages[0])


def test_lanes_stay_inside_a_site() -> None:
    site = np.arange(4) % 2
    latency_s = np.where(site[:, None] == site, 0.01, 10.0)
    stages = propose_placement(candidates_of(latency_s, 2), (2, 2), Rules(stages=2, visited=2), 3)
    assert [len({peer % 2 for peer in replicas}) for replicas in stages] == [2, 2]
