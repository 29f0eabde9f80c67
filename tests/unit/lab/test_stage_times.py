"""The prediction beside measured iterations plans as a run does."""

import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.lab import stage_times

PEERS = 8


@pytest.fixture
def links(tmp_path: Path) -> Path:
    """As an origin leaves it."""
    draws = np.random.default_rng(3)
    path = tmp_path / "links.json"
    measured = {
        "peers": [f"w{index}" for index in range(PEERS)],
        "stage": [index % stage_times.STAGES for index in range(PEERS)],
        "latency_s": draws.uniform(0.005, 0.1, (PEERS, PEERS)).tolist(),
        "rate_bytes_per_s": draws.uniform(6e5, 1e7, (PEERS, PEERS)).tolist(),
        "forward_s": [0.05] * PEERS,
        "backward_s": [0.12] * PEERS,
        "loss_s": [0.02] * PEERS,
        "memory": [3] * PEERS,
        "activation_bytes": 98304,
        "microbatches": stage_times.MICROBATCHES,
        "skip": 0,
    }
    path.write_text(json.dumps(measured))
    return path


@pytest.mark.parametrize(
    ("routing", "wanted"),
    [
        ("full", [("full", 0)]),
        ("stochastic", [("stochastic", 0)]),
        ("random", [("random", seed) for seed in range(20)]),
        ("skip", [("skip", seed) for seed in range(stage_times.STAGES - 1)]),
    ],
)
def test_it_is_the_median_over_the_kinds_of_routes(
    routing: str, wanted: list[tuple[str, int]], links: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_times, "SEARCH_S", 0.05)
    predict, asked, took_s = stage_times.predict, [], []

    def seen(
        pipeline: Any, rules: Any, origins: Any, routing: str, seed: int, **options: Any
    ) -> Any:
        made = predict(pipeline, rules, origins, routing, seed, **options)
        assert options == {"shared_uplinks": True, "effort_s": 0.05}
        asked.append((routing, seed))
        took_s.append(made.iteration_s)
        return made

    monkeypatch.setattr(stage_times, "predict", seen)
    assert stage_times.predicted(links, routing) == statistics.median(took_s)
    assert asked == wanted
