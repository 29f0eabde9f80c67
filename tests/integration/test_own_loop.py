"""`murmuration.Swarm` around a loop of one's own: real processes on real sockets."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from murmuration.worker.config import Config, load_config, to_document
from tests.support.head_starts import AnchorPrefetch
from tests.support.reference import reference_hashes
from tests.support.workers import (
    SMALL,
    Hashes,
    WorkerProcess,
    free_addresses,
    settings_of,
    wait_until_listens,
)

PROGRAM = ("tests.support.own_loop",)


class Loops:
    """Some loops on loopback; the first starts the run, and the others join it there."""

    def __init__(self, config: Config, out: Path, count: int, **first: object) -> None:
        self._task, self._out = to_document(config), out
        (self._address,) = free_addresses(1)
        self._first = {"min_peers": count, "listen": self._address, **first}
        self.names = [f"w{index}" for index in range(count)]
        self.running: dict[str, WorkerProcess] = {}

    def start(self, name: str, **extra: object) -> WorkerProcess:
        if name != "w0":
            wait_until_listens(self._address)
        shared = {"name": name, "out": str(self._out / name), "task": self._task}
        own = self._first if name == "w0" else {"join": self._address}
        arguments = json.dumps({**shared, **own, **extra})
        self.running[name] = WorkerProcess([arguments], name, PROGRAM)
        return self.running[name]

    def results(self, *names: str) -> dict[str, dict[str, Any]]:
        found = {}
        for name in names or self.names:
            loop = self.running[name]
            assert loop.wait() == 0, f"{name}: {loop.errors}"
            found[name] = loop.result
        return found

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = (self._out / name / "events.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@contextmanager
def loops(config: Config, out: Path, count: int, **first: object) -> Iterator[Loops]:
    running = Loops(config, out, count, **first)
    try:
        yield running
    finally:
        for each in running.running.values():
            each.end()


def run_of(
    preset: str, steps: int, task: Sequence[str] = (), **values: object
) -> tuple[Config, dict[str, object]]:
    """The config of a daemon, and the same as arguments of `Swarm`; `task`: more settings."""
    settings = settings_of(run__steps=steps, run__seed=3, **values)
    config = load_config(None, [*SMALL, *settings, *task][1::2], preset)
    plan = {key.replace("__", "."): value for key, value in values.items() if "diloco" in key}
    return config, {"preset": preset, "steps": steps, "settings": {"run.seed": 3, **plan}}


@pytest.mark.parametrize(
    ("preset", "extra"),
    [
        ("streaming", {"diloco__inner_steps": 10, "diloco__overlap_steps": 3}),
        ("noloco", {"diloco__inner_steps": 6}),
        ("ddp", {"inner__clip": 0}),
    ],
    ids=["streaming in 4 bits", "noloco", "ddp"],
)
def test_a_loop_of_ones_own_equals_the_reference(
    tmp_path: Path, preset: str, extra: Mapping[str, object]
) -> None:
    config, arguments = run_of(preset, 25, **extra)
    with loops(config, tmp_path, 4, **arguments) as swarm:
        for name in swarm.names:
            swarm.start(name)
        results = swarm.results()
    assert {result["rounds_failed"] for result in results.values()} == {0}
    hashes = {name: Hashes.of(result) for name, result in results.items()}
    head_starts = AnchorPrefetch({name: swarm.events(name) for name in swarm.names})
    known = {} if preset != "noloco" else {"head_starts": head_starts}
    run = results["w0"]["run"]
    assert hashes == reference_hashes(config, swarm.names, run=run, **known)
    # After the block the model is what all agree on.
    assert len({result["model_hash"] for result in results.values()}) == 1


@pytest.mark.parametrize("trainer", ["transformers", "lightning"])
def test_a_trainer_with_a_callback_equals_the_same_run_by_a_task(
    tmp_path: Path, trainer: str
) -> None:
    config, arguments = run_of(
        "diloco",
        25,
        # Lightning sums the squares of another order of parameters, which rounds otherwise.
        inner__clip=0 if trainer == "lightning" else 1,
        diloco__inner_steps=10,
        inner__warmup_steps=0,
        inner__schedule='"constant"',
    )
    with loops(config, tmp_path, 2, **arguments) as swarm:
        for name in swarm.names:
            swarm.start(name, trainer=trainer)
        results = swarm.results()
    hashes = {name: Hashes.of(result) for name, result in results.items()}
    assert hashes == reference_hashes(config, swarm.names, run=results["w0"]["run"])
    assert len({result["model_hash"] for result in results.values()}) == 1
