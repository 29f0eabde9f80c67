"""What an iteration in stages would take: the figures that docs/evidence quotes."""

import itertools

import pytest

from tests.lab import plan_stages
from tests.lab.placement import Groups
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
