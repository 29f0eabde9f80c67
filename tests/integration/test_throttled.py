"""Bandwidth-throttled training: on slow links real swarms learn what they would on fast ones."""

import json
from pathlib import Path
from typing import Any

from murmuration.worker.config import load_config
from tests.support.fork_server import MURMUR, run
from tests.support.head_starts import AnchorPrefetch
from tests.support.reference import reference_hashes
from tests.support.workers import PATIENCE_S, SMALL, Hashes, settings_of

WORKERS = ["w0", "w1", "w2"]


def train(out: Path, preset: str, *args: str, **settings: object) -> dict[str, Any]:
    """The report of a swarm of three that reaches its end with all rounds in order."""
    command = [*MURMUR, "swarm", "--workers", "3", "--preset", preset]
    command += ["--out", str(out), *args, *SMALL, *settings_of(**settings)]
    done = run(command, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    assert report["workers"] == len(report["peers"]) == 3
    assert (report["step"], report["rounds_failed"]) == (settings["run__steps"], 0)
    assert report["hashes_agree"]
    return report


def agreed(report: dict[str, Any]) -> Hashes:
    (hashes,) = {Hashes.of(peer) for peer in report["peers"]}
    return hashes


def test_a_slow_link_changes_no_bit(tmp_path: Path) -> None:
    preset, link = "streaming", "2mbit,delay=50ms,jitter=10ms"
    settings = {"run__steps": 24, "run__seed": 5, "diloco__inner_steps": 8}
    report = train(tmp_path / "run", preset, "--link", link, **settings)
    assert report["link"] == link
    config = load_config(None, [*SMALL, *settings_of(**settings)][1::2], preset)
    assert dict.fromkeys(WORKERS, agreed(report)) == reference_hashes(config, WORKERS)


def test_a_slow_link_changes_only_when_pairs_take_head_starts(tmp_path: Path) -> None:
    preset = "streaming-noloco"
    settings = {"run__steps": 24, "run__seed": 5, "diloco__inner_steps": 8}
    report = train(tmp_path / "run", preset, "--link", "5mbit,delay=20ms", **settings)
    config = load_config(None, [*SMALL, *settings_of(**settings)][1::2], preset)
    assert dict.fromkeys(WORKERS, agreed(report)) == reference_hashes(
        config, WORKERS, AnchorPrefetch.of_run(tmp_path / "run")
    )
