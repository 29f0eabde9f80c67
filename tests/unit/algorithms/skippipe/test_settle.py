"""Surplus visits are banned until every limit is kept."""

from algorithms.skippipe.planner import Planner
from algorithms.skippipe.route import Route, Rules
from algorithms.skippipe.scores import Journal
from algorithms.skippipe.settle import Draft, Limit, settle
from tests.unit.algorithms.skippipe.pipelines import even_pipeline

PIPELINE = even_pipeline((3, 2, 2))
FREE = frozenset[int]()


def settled(limits: list[Limit], journal: Journal, visited: int = 2) -> list[Draft]:
    planner = Planner(PIPELINE, Rules(stages=3, visited=visited))
    alone = [planner.best(origin) for origin in PIPELINE.stages[0]]
    root = Draft(tuple(route for route in alone if route), (FREE,) * 3)
    return settle([root], limits, planner, journal, phase="stages", plan_effort_s=0.001, share=1.0)


def test_the_surplus_goes_where_there_is_room() -> None:
    """On equal links all three would go by peer 3, the first on stage 1."""
    limits = [Limit(f"peer {peer}", frozenset([peer]), 1) for peer in range(3, 7)]
    drafts = settled(limits, Journal(1.0))
    assert sorted(route.peers[1] for route in drafts[0].routes) == [3, 4, 5]


def test_a_limit_on_a_stage_counts_all_its_replicas() -> None:
    limits = [Limit("stage 1", frozenset([3, 4]), 1), Limit("stage 2", frozenset([5, 6]), 2)]
    draft = settled(limits, Journal(1.0))[0]
    assert sorted(route.peers[1] for route in draft.routes) == [3, 5, 5]
    assert sum(bool(banned) for banned in draft.banned) == 2


def test_limits_that_cannot_be_kept_are_told() -> None:
    journal = Journal(1.0)
    assert settled([Limit("stage 1", frozenset([3, 4]), 2)], journal, visited=3) == []
    reasons = [rejection.reason for rejection in journal.rejections]
    assert "route 0 has no other way than by stage 1" in reasons
    assert "stage 1: 1 visits too many, 0 routes can do without" in reasons


def test_without_effort_nothing_is_tried() -> None:
    journal = Journal(0.0)
    assert settled([Limit("stage 1", frozenset([3, 4]), 1)], journal) == []
    assert journal.spent_s == 0.0


def test_the_peers_of_a_draft_that_keeps_its_limits_stay() -> None:
    draft = settled([Limit("stage 1", frozenset([3, 4]), 3)], Journal(1.0))[0]
    assert draft.routes == tuple(Route((origin, 3)) for origin in PIPELINE.stages[0])
