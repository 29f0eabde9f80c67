"""What a pipeline refuses."""

from dataclasses import replace

import pytest

from tests.unit.algorithms.skippipe.pipelines import even_pipeline


def test_each_peer_knows_its_stage() -> None:
    assert even_pipeline((2, 1, 2)).stage_of == (0, 0, 1, 2, 2)


@pytest.mark.parametrize(
    ("stages", "reason"),
    [
        (((0, 1), ()), "stage 1 has no replica"),
        (((0, 1), (1,)), "exactly one"),
        (((0,), (1,)), "exactly one"),
    ],
)
def test_peers_that_serve_no_stage_or_two_are_refused(
    stages: tuple[tuple[int, ...], ...], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        replace(even_pipeline((2, 1)), stages=stages)


def test_a_peer_without_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="memory"):
        replace(even_pipeline((2, 1)), memory=(1, 1, 0))
