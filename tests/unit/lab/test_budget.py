"""How a limit turns into fewer steps, and fewer steps into a whole run's wall time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from murmuration.algorithms.link import Link
from tests.lab.compare.budget import Cost, Measured, cost_of, steps_within, wall_of


def cost(**changes: float) -> Cost:
    plain = {"step_s": 0.1, "inner_steps": 20, "round_s": 8.0}
    return Cost(**{**plain, **changes})


def test_ddp_does_at_least_twenty_steps() -> None:
    ddp = cost_of("ddp", params=381_600, workers=4, inner_steps=1, step_s=0.1, link=link(2))
    assert ddp.round_s == pytest.approx(0.05 + 2 * 0.75 * 381_600 * 32 / 1.8e6)
    assert steps_within(60.0, 400, ddp) == 20


def test_overlapped_rounds_cost_time_only_where_they_take_longer_than_their_steps() -> None:
    assert cost(overlaps=True).run_s(200) == pytest.approx(80.0)
    assert cost(overlaps=True, round_s=1.0).run_s(200) == pytest.approx(20.0)
    assert cost(round_s=1.0).run_s(200) == pytest.approx(30.0)


def test_low_bits_and_delay_count() -> None:
    def round_s(name: str, **delay: float) -> float:
        costs = cost_of(
            name, params=10**6, workers=2, inner_steps=20, step_s=0.1, link=link(20, **delay)
        )
        return costs.round_s

    assert round_s("diloco") - 0.05 == pytest.approx((round_s("streaming") - 0.05) * 32 / 4.125)
    assert round_s("diloco", delay_s=0.05) == pytest.approx(round_s("diloco") + 0.1)
    assert round_s("something-new") == round_s("diloco")


@given(
    asked=st.integers(1, 2000),
    limit_s=st.floats(0.1, 1e4),
    inner_steps=st.integers(1, 500),
    round_s=st.floats(0.0, 100.0),
)
def test_steps_fit_or_are_the_least(
    asked: int, limit_s: float, inner_steps: int, round_s: float
) -> None:
    run = Cost(step_s=0.1, inner_steps=inner_steps, round_s=round_s)
    steps = steps_within(limit_s, asked, run)
    assert 1 <= steps <= asked
    assert steps == asked or steps % inner_steps == 0
    assert run.run_s(steps) <= limit_s * (1 + 1e-9) or steps <= 2 * inner_steps


@given(
    rounds=st.integers(2, 20),
    more=st.integers(1, 10),
    step_s=st.floats(0.01, 1.0),
    pause_s=st.floats(0.0, 20.0),
)
def test_a_short_run_foretells_a_long_one(
    rounds: int, more: int, step_s: float, pause_s: float
) -> None:
    """The pause after the last step is in stall_s, but not in wall_s."""

    def wall_s(rounds: int) -> float:
        return rounds * 20 * step_s + (rounds - 1) * pause_s

    short = measured(steps=20 * rounds, rounds=rounds, wall_s=wall_s(rounds), stall=pause_s)
    assert wall_of(short, 20 * rounds * more) == pytest.approx(wall_s(rounds * more))


def test_ddp_waits_within_its_steps() -> None:
    short = Measured(steps=20, wall_s=40.0, compute_s=2.0, stall_s=38.0, rounds=20, inner_steps=1)
    assert wall_of(short, 400) == pytest.approx(800.0)


def test_local_has_no_rounds() -> None:
    short = measured(steps=20, rounds=0, wall_s=4.0, stall=0.0)
    assert wall_of(short, 40) == pytest.approx(8.0)
    assert wall_of(short, 20) == 4.0


def link(mbps: float, **others: float) -> Link:
    return Link(rate_mbps=mbps, **others)


def measured(*, steps: int, rounds: int, wall_s: float, stall: float) -> Measured:
    return Measured(
        steps=steps,
        wall_s=wall_s,
        compute_s=1.0,
        stall_s=stall * rounds,
        rounds=rounds,
        inner_steps=20,
    )
