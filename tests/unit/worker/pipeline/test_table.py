"""From gossiped profiles to what routes are planned on: the same wherever the same was heard."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.unit.worker.pipeline.members import cards_of, telling
from worker.cli.plan_measurements import read_links
from worker.errors import UsageError
from worker.membership import Health, Phase
from worker.pipeline.config import StagesConfig
from worker.pipeline.network_snapshot import (
    links_document,
    links_of,
    measured_share,
    table_name,
    table_of,
)
from worker.pipeline.profile import Profile

CONFIG = StagesConfig(count=2, skip=0.0, microbatches=3)


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


def test_a_table_is_named_by_who_serves_and_what_was_measured() -> None:
    members = cards_of(0, 1, 1)
    name = table_name(members)
    assert table_name(list(reversed(members))) == name
    others = [
        telling(members[2], Profile(forward_s=1.0)),
        replace(members[2], epoch=2),
        replace(members[2], stage=0),
        replace(members[2], health=Health.SUSPECT),
        replace(members[2], phase=Phase.DONE),
    ]
    names = [table_name([*members[:2], other]) for other in others]
    assert name not in names
    assert table_name([*members[:2], replace(members[2], step=9, heartbeat=4)]) == name


def test_what_nobody_has_measured_is_as_what_was() -> None:
    members = cards_of(0, 1, 1)
    members[1] = telling(members[1], Profile(forward_s=0.5, backward_s=1.5, memory=9))
    table = table_of(members)
    assert table is not None
    assert table.pipeline.costs.forward_s.tolist() == [0.5, 0.5, 0.5]
    assert table.pipeline.costs.backward_s.tolist() == [1.5, 1.5, 1.5]
    assert table.pipeline.memory == (9, 9, 9)


def test_a_links_latency_is_the_shorter_that_was_told_and_its_rate_the_senders() -> None:
    mine = Profile(latency_s={"b": 0.03}, rate_bytes_per_s={"b": 1e6})
    theirs = Profile(latency_s={"a": 0.01}, rate_bytes_per_s={"a": 5e6})
    links = links_of(["a", "b"], [mine, theirs])
    assert links.latency_s[0, 1] == links.latency_s[1, 0] == 0.01
    assert links.rate_bytes_per_s[0, 1] == 1e6
    assert links.rate_bytes_per_s[1, 0] == 5e6


def test_a_link_counts_as_measured_with_a_latency_and_a_rate_one_way() -> None:
    members = cards_of(0, 1, 1)
    profiles = {
        0: Profile(latency_s={"p1": 0.1, "p2": 0.1}, rate_bytes_per_s={"p2": 1e6}),
        1: Profile(rate_bytes_per_s={"p0": 1e6, "p2": 1e6}),
    }
    for told, expected in (([], 0.0), ([0], 1 / 3), ([0, 1], 2 / 3)):
        table = table_of(
            [telling(c, profiles[n]) if n in told else c for n, c in enumerate(members)]
        )
        assert table is not None
        assert measured_share(table) == pytest.approx(expected)
    alone = table_of(cards_of(0))
    assert alone is not None
    assert measured_share(alone) == 0.0


def test_a_document_has_what_was_told_and_null_for_the_rest(tmp_path: Path) -> None:
    members = cards_of(0, 1, 1)
    members[0] = telling(
        members[0],
        Profile(
            latency_s={"p1": 0.02, "p9": 5.0},
            rate_bytes_per_s={"p1": 1e6},
            forward_s=0.1,
            backward_s=0.3,
            loss_s=0.05,
            visit_bytes=4096,
            memory=5,
        ),
    )
    members[1] = telling(members[1], Profile(rate_bytes_per_s={"p0": 3e6}, forward_s=0.2))
    table = table_of(members)
    assert table is not None
    document = links_document(table, CONFIG)
    assert document == {
        "peers": ["p0", "p1", "p2"],
        "stage": [0, 1, 1],
        "latency_s": [[None, 0.02, None], [0.02, None, None], [None, None, None]],
        "rate_bytes_per_s": [[None, 1e6, None], [3e6, None, None], [None, None, None]],
        "forward_s": [0.1, 0.2, None],
        "backward_s": [0.3, None, None],
        "loss_s": [0.05, None, None],
        "memory": [5, None, None],
        "activation_bytes": 4096,
        "microbatches": 3,
        "skip": 0.0,
        "spread": 0,
    }
    path = tmp_path / "links.json"
    path.write_text(json.dumps(document, allow_nan=False))
    known, costs = read_links(path), table.pipeline.costs
    assert known.visits is not None
    assert known.filled == (
        "4 of 6 latencies",
        "4 of 6 rates",
        "1 of 3 forward times",
        "2 of 3 backward times",
        "2 of 3 memories",
    )
    # Who reads it fills the gaps as the run has done.
    np.testing.assert_allclose(known.links.delay_s(), costs.delay_s)
    np.testing.assert_allclose(known.links.transfer_s(4096), costs.transfer_s)
    np.testing.assert_allclose(known.visits.forward_s, costs.forward_s)
    np.testing.assert_allclose(known.visits.backward_s, costs.backward_s)
    assert known.memory == table.pipeline.memory


def test_a_document_of_nothing_measured_is_refused(tmp_path: Path) -> None:
    table = table_of(cards_of(0, 1))
    assert table is not None
    document = links_document(table, CONFIG)
    assert document["forward_s"] == document["memory"] == [None, None]
    assert document["activation_bytes"] is None
    path = tmp_path / "links.json"
    path.write_text(json.dumps(document, allow_nan=False))
    with pytest.raises(UsageError, match="nothing is measured between any two peers"):
        read_links(path)
