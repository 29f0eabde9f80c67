"""From gossiped profiles to routes: the same wherever the same was heard."""

from dataclasses import replace

import pytest

from worker.membership import Card, Health, Phase
from worker.stages import StagesConfig
from worker.stages.profile import Profile
from worker.stages.schedule import links_of, planned_rules, schedule_name, table_of


def cards_of(*stages: int) -> list[Card]:
    """A peer for each, named by where it stands."""
    return [
        Card(f"p{n}", f"p{n}", epoch=1, phase=Phase.TRAINING, stage=stage)
        for n, stage in enumerate(stages)
    ]


def test_a_table_numbers_those_that_serve_by_stage() -> None:
    table = table_of(cards_of(0, 2, 0, 1))
    assert table is not None
    assert table.peers == ("p0", "p1", "p2", "p3")
    assert table.stages == (0, 1, 2)
    assert table.pipeline.stages == ((0, 2), (3,), (1,))


def test_a_stage_that_nobody_serves_is_left_out_and_without_origins_there_is_no_table() -> None:
    table = table_of(cards_of(0, 3))
    assert table is not None
    assert table.stages == (0, 3)
    assert table_of(cards_of(1, 2)) is None
    assert table_of([]) is None


def test_a_schedule_is_named_by_who_serves_and_what_was_measured() -> None:
    cards = cards_of(0, 1, 1)
    name = schedule_name(cards)
    assert schedule_name(list(reversed(cards))) == name
    others = [
        replace(cards[2], profile=Profile(forward_s=1.0).pack()),
        replace(cards[2], epoch=2),
        replace(cards[2], stage=0),
        replace(cards[2], health=Health.SUSPECT),
        replace(cards[2], phase=Phase.DONE),
    ]
    names = [schedule_name([*cards[:2], other]) for other in others]
    assert name not in names
    assert schedule_name([*cards[:2], replace(cards[2], step=9, heartbeat=4)]) == name


def test_what_nobody_has_measured_is_as_what_was() -> None:
    cards = cards_of(0, 1, 1)
    cards[1] = replace(cards[1], profile=Profile(forward_s=0.5, backward_s=1.5, memory=9).pack())
    table = table_of(cards)
    assert table is not None
    assert table.pipeline.costs.forward_s.tolist() == [0.5, 0.5, 0.5]
    assert table.pipeline.costs.backward_s.tolist() == [1.5, 1.5, 1.5]
    assert table.pipeline.memory[1] == 9


def test_a_links_latency_is_the_shorter_that_was_told_and_its_rate_the_senders() -> None:
    mine = Profile(latency_s={"b": 0.03}, rate_bytes_per_s={"b": 1e6})
    theirs = Profile(latency_s={"a": 0.01}, rate_bytes_per_s={"a": 5e6})
    links = links_of(["a", "b"], [mine, theirs])
    assert links.latency_s[0, 1] == links.latency_s[1, 0] == 0.01
    assert links.rate_bytes_per_s[0, 1] == 1e6
    assert links.rate_bytes_per_s[1, 0] == 5e6


@pytest.mark.parametrize("count", [2, 4, 6, 9])
@pytest.mark.parametrize("skip", [0.0, 0.25, 0.5])
def test_rules_can_be_kept_whatever_stages_are_left(count: int, skip: float) -> None:
    config = StagesConfig(count=count, routing="random", skip=skip)
    whole = config.rules(1)
    for left in range(1, count + 1):
        table = table_of(cards_of(*range(left)))
        assert table is not None
        rules = planned_rules(config, table, 1)
        assert rules.stages == left
        assert (rules.visited > 1) == (left > 1)
        assert rules.stages - rules.visited <= whole.stages - whole.visited
