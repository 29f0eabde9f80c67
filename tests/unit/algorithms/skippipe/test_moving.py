"""Which stage a peer joins, and when it moves."""

import pytest

from algorithms.skippipe.moving import stage_to_join, stage_to_move_to


def test_a_new_peer_joins_the_slowest_stage_the_first_of_equals() -> None:
    assert stage_to_join([3.0, 1.0, 1.0]) == 1


@pytest.mark.parametrize(
    ("stages", "to", "reason"),
    [
        ([{1: 1.0, 2: 1.0, 3: 1.0}, {4: 1.0}], 1, "stage 1 is the slowest, at 1"),
        ([{1: 1.0}, {4: 0.1}], None, "the last replica of stage 0"),
        ([{1: 1.0, 2: 1.0}, {4: 3.0}], None, "stage 0 is the slowest"),
        ([{1: 1.0, 2: 1.0}, {4: 1.0}], None, "by less than a factor of 1.2"),
    ],
)
def test_a_peer_moves_for_a_real_gain_and_never_orphans_a_stage(
    stages: list[dict[int, float]], to: int | None, reason: str
) -> None:
    move = stage_to_move_to(1, stages)
    assert move.stage == to
    assert reason in move.reason
