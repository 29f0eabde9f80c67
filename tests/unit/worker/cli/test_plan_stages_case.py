"""`murmur plan --stages`: how many stages its routes visit, by flags, the run and measurements."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from worker.cli.plan import plan
from worker.errors import UsageError

BY_HAND = ("--forward-ms", "100", "--activation-bytes", "125000")
QUICK = ("--effort", "0.02")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def printed(*args: str) -> str:
    result = CliRunner().invoke(plan, [*args])
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result.output


def document(*args: str) -> dict[str, Any]:
    return json.loads(printed(*args, *QUICK, "--json"))


def by_routing(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["routing"]: row for row in found["routings"]}


def test_unequal_routes_are_told_as_such() -> None:
    Path("run.toml").write_text('[stages]\ncount = 6\nrouting = "skip"\nskip = 0.33\nspread = 1\n')
    arguments = ("run.toml", *BY_HAND, *QUICK, "--link", "20mbit")
    found = document(*arguments)
    assert (found["visited"], found["spread"]) == (4, 1)
    for name, lengths in (("full", {6}), ("random", {3, 4, 5}), ("skip", {3, 4, 5})):
        assert {len(route) for route in by_routing(found)[name]["routes"]} <= lengths
    assert {3, 5} <= {len(route) for route in by_routing(found)["skip"]["routes"]}
    assert "routes that skip visit 3 to 5 of 6 stages" in printed(*arguments)
    assert document(*arguments, "--skip", "0")["spread"] == 0
    assert document(*arguments, "--spread", "0")["spread"] == 0
    refused = CliRunner().invoke(plan, [*arguments, "--skip", "0", "--spread", "1"]).exception
    assert isinstance(refused, UsageError)
    assert str(refused).startswith("--skip 0 --spread 1: routes of 6 of 6 stages cannot be unequal")


def test_the_run_says_how_it_is_cut() -> None:
    Path("run.toml").write_text(
        '[stages]\ncount = 4\nrouting = "skip"\nskip = 0.5\nmicrobatches = 3\n'
    )
    found = document("run.toml", *BY_HAND, "--link", "20mbit")
    assert (found["stages"], found["visited"], found["microbatches"]) == (4, 2, 3)
    again = document("run.toml", *BY_HAND, "--link", "20mbit", "--skip", "0.25")
    assert again["visited"] == 3


@pytest.mark.parametrize(
    ("args", "visited"),
    [
        (("--stages", "2", "--skip", "0"), 2),
        (("--stages", "8"), 6),
        (("--stages", "4", "--set", "stages.skip=0.5"), 2),
        (("--stages", "6"), 4),
    ],
)
def test_a_run_of_other_stages_says_nothing_of_skips_and_layers(
    args: tuple[str, ...], visited: int
) -> None:
    Path("run.toml").write_text(
        '[stages]\ncount = 6\nrouting = "skip"\nskip = 0.33\nspread = 1\nmicrobatches = 3\n'
        "layers = [1, 1, 2, 1, 1, 1]\n"
    )
    found = document("run.toml", *BY_HAND, "--link", "20mbit", *args)
    assert (found["stages"], found["visited"]) == (int(args[1]), visited)
    assert (found["spread"], found["microbatches"]) == (args[1] == "6", 3)


@pytest.mark.parametrize(
    ("flags", "visited", "spread"),
    [
        ((), 3, 1),
        (("--spread", "0"), 3, 0),
        (("--skip", "0"), 4, 0),
        (("--skip", "0.5", "--spread", "0"), 2, 0),
    ],
)
def test_unequal_routes_of_the_file_can_be_planned_without(
    flags: tuple[str, ...], visited: int, spread: int
) -> None:
    entries = {
        "peers": ["ant", "bee", "cat", "dog"],
        "stage": [0, 1, 2, 3],
        "latency_s": [[0.02] * 4] * 4,
        "rate_bytes_per_s": [[1e6] * 4] * 4,
        "skip": 0.25,
        "spread": 1,
    }
    Path("links.json").write_text(json.dumps(entries))
    found = document(*BY_HAND, "--links", "links.json", *flags)
    assert (found["visited"], found["spread"]) == (visited, spread)
