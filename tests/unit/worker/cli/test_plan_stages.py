"""`murmur plan --stages`: what it predicts, prints and refuses, and the file that it reads."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from murmuration.algorithms.skippipe.assignment import Groups
from murmuration.algorithms.skippipe.pipeline import Floats
from murmuration.worker.cli.plan_command import plan
from murmuration.worker.cli.plan_model import StageCuts, compared_cuts
from murmuration.worker.cli.plan_stages import cut_remark
from tests.support import commands

BY_HAND = ("--forward-ms", "100", "--activation-bytes", "125000")
FEW = ("--replicas", "1", "--microbatches", "4")
LINKS = "5mbit,delay=100ms; 100mbit,delay=5ms; 20mbit,delay=30ms; 50mbit,delay=10ms"

MEASURED: dict[str, Any] = {
    "peers": ["ant", "bee", "cat", "dog"],
    "stage": [0, 1, 0, 1],
    "latency_s": [[None if i == j else 0.02 for j in range(4)] for i in range(4)],
    "rate_bytes_per_s": [[None if i == j else 1e6 for j in range(4)] for i in range(4)],
    "forward_s": [0.1, 0.1, 0.2, 0.2],
    "backward_s": [0.2, 0.2, 0.4, 0.4],
    "loss_s": [0.05, None, 0.1, None],
    "memory": [2, 3, 2, 3],
    "activation_bytes": 100_000,
    "microbatches": 2,
    "skip": 0.0,
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("murmuration.worker.cli.plan_stages.EFFORT_S", 0.02)
    (tmp_path / "text.txt").write_text("some text to learn from. " * 200)
    return tmp_path


@pytest.fixture
def placed_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is searched for: the first peers serve stage 0."""

    def in_order(_: object, sizes: tuple[int, ...], *__: object, **___: object) -> Groups:
        peers = itertools.count()
        return tuple(tuple(itertools.islice(peers, size)) for size in sizes)

    monkeypatch.setattr("murmuration.worker.cli.plan_stages.propose_placement", in_order)


def printed(*args: str) -> str:
    return commands.printed(plan, *args)


def document(*args: str) -> dict[str, Any]:
    return json.loads(printed(*args, "--json"))


def refused(*args: str) -> str:
    return commands.refused(plan, 2, *args)


def measured(**changes: Any) -> str:
    """The name of a file of measurements; entries that are changed to ... are left out."""
    entries = {name: value for name, value in (MEASURED | changes).items() if value is not ...}
    Path("links.json").write_text(json.dumps(entries))
    return "links.json"


def by_routing(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["routing"]: row for row in found["routings"]}


@pytest.mark.usefixtures("placed_in_order")
def test_one_link_stands_for_all_peers_and_times_add_up() -> None:
    """One peer a stage, one microbatch: 2 hops there, 2 back, of 100 ms and 50 ms each."""
    arguments = ("--stages", "2", "--replicas", "1", "--microbatches", "1", "--skip", "0")
    found = document(*BY_HAND, *arguments, "--link", "10mbit,delay=50ms")
    assert found["peers"] == ["w0", "w1"]
    full = by_routing(found)["full"]
    computing_s = 2 * 0.1 + 0.025 + 2 * 0.25
    assert full["iteration_s"] == pytest.approx(computing_s + 4 * (0.05 + 0.1))
    assert full["utilization_of_peers"] == pytest.approx(
        [0.375 / full["iteration_s"], 0.35 / full["iteration_s"]]
    )
    assert full["of_full"] == 1.0
    assert full["routes"] == [["w0", "w1"]]


@pytest.mark.usefixtures("placed_in_order")
def test_the_slower_rate_and_the_mean_of_the_delays_make_a_link() -> None:
    arguments = ("--stages", "2", "--microbatches", "1", "--skip", "0")
    links = ("--link", "10mbit,delay=50ms", "--link", "20mbit,delay=30ms")
    full = by_routing(document(*BY_HAND, *arguments, *links))["full"]
    assert full["iteration_s"] == pytest.approx(0.725 + 4 * (0.1 + 0.04))


@pytest.mark.usefixtures("placed_in_order")
def test_every_routing_is_told_with_its_routes() -> None:
    found = document(*BY_HAND, "--stages", "4", "--microbatches", "6", "--link", "20mbit")
    assert (found["stages"], found["visited"], found["skip"]) == (4, 3, 0.25)
    assert (found["microbatches"], found["memory"]) == (6, [3] * 8)
    rows = by_routing(found)
    assert list(rows) == ["full", "random", "stochastic", "skip"]
    assert [row["visited"] for row in rows.values()] == [4, 3, 4, 3]
    assert [row["draws"] for row in rows.values()] == [1, 20, 1, 1]
    stage_of = {name: n for n, names in enumerate(found["stage_peers"]) for name in names}
    for row in rows.values():
        assert len(row["routes"]) == 12
        for route in row["routes"]:
            stages = [stage_of[name] for name in route]
            assert stages == sorted(set(stages))
            assert (len(stages), stages[0]) == (row["visited"], 0)
        assert row["of_full"] == row["iteration_s"] / rows["full"]["iteration_s"]
        assert row["in_flight"] <= 3


def test_the_slow_line_is_kept_away_from_stage_0() -> None:
    found = document(*BY_HAND, "--stages", "2", "--link", LINKS)
    assert "w0" not in found["stage_peers"][0]
    assert found["links"][0] == "5mbit,delay=100ms"


@pytest.mark.usefixtures("placed_in_order")
def test_peers_that_do_not_divide_evenly_go_where_most_visits_are() -> None:
    nine = ("--link", ";".join(["20mbit"] * 9), "--stages", "4", "--skip", "0.25")
    sizes = [len(names) for names in document(*BY_HAND, *nine)["stage_peers"]]
    assert sizes == [3, 2, 2, 2]
    eight = ("--link", "20mbit", "--stages", "4", "--replicas", "2", "--skip", "0.5")
    sizes = [len(names) for names in document(*BY_HAND, *eight)["stage_peers"]]
    assert sizes == [2, 2, 2, 2]


def test_the_table_is_readable_in_a_pipe() -> None:
    text = printed(*BY_HAND, "--stages", "4", "--link", f"{LINKS};{LINKS}")
    lines = text.splitlines()
    assert lines[0] == (
        "4 stages, 8 peers; each replica of stage 0 begins 8 microbatches; routes that skip visit "
        "3 of 4 stages"
    )
    assert lines[1] == "a visit: 100 ms forward, 250 ms backward, 25 ms loss, as given"
    assert "w0 (5mbit,delay=100ms)" in text
    for routing, visits in (("full", 4), ("random", 3), ("stochastic", 4), ("skip", 3)):
        assert any(line.startswith(f"  {routing} ") and f"{visits} of 4" in line for line in lines)
    assert "routes of skip" in text
    assert "random: mean of 20 draws" in text
    assert "\x1b" not in text


@pytest.mark.usefixtures("placed_in_order")
def test_a_model_of_the_run_is_cut_timed_and_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("murmuration.worker.cli.plan_model._medians", lambda run, **_: run())
    threads = torch.get_num_threads()
    arguments = ("--set", "task.text=text.txt", "--stages", "3", "--link", "20mbit")
    found = document(*arguments)
    assert torch.get_num_threads() == threads
    assert found["compute_source"] == "measured on this machine, one thread"
    assert found["activation_bytes"] == 4 * 128 * 96 * 2  # tiny: batch, context, width; bf16
    assert all(
        back_s > there_s
        for back_s, there_s in zip(found["backward_s"], found["forward_s"], strict=True)
    )
    int8 = ("--set", "stages.activations=int8")
    smaller = document(*arguments, "--forward-ms", "9", *int8)
    assert smaller["activation_bytes"] < 0.6 * found["activation_bytes"]
    assert smaller["forward_s"] == [0.009] * 6


@pytest.mark.usefixtures("placed_in_order")
def test_measurements_are_taken_as_they_are() -> None:
    found = document("--links", measured())
    assert found["peers"] == ["ant", "bee", "cat", "dog"]
    assert (found["placement"], found["stage_peers"]) == (
        "measured",
        [["ant", "cat"], ["bee", "dog"]],
    )
    assert (found["forward_s"], found["backward_s"]) == ([0.1, 0.1, 0.2, 0.2], [0.2, 0.2, 0.4, 0.4])
    assert (found["memory"], found["microbatches"]) == ([2, 3, 2, 3], 2)
    assert found["not_measured"] == []
    assert found["loss_s"][0::2] == [0.05, 0.1]
    # One microbatch of the slow pair behind the other: a lane of cat and dog.
    full = by_routing(found)["full"]
    assert full["routes"] == [["ant", "bee"], ["cat", "dog"]] * 2
    assert full["iteration_s"] >= 0.2 + 0.2 + 0.1 + 0.4 + 0.4 + 4 * 0.12


@pytest.mark.usefixtures("placed_in_order")
def test_what_is_not_measured_is_the_median_of_the_rest_and_told() -> None:
    latency_s = json.loads(json.dumps(MEASURED["latency_s"]))
    latency_s[0][1] = None
    changes = {
        "latency_s": latency_s,
        "forward_s": [0.1, None, 0.3, 0.2],
        "backward_s": ...,
        "memory": [2, None, 7, 4],
    }
    found = document("--links", measured(**changes))
    told = ["1 of 12 latencies", "1 of 4 forward times", "1 of 4 memories"]
    assert found["not_measured"] == told
    assert found["memory"] == [2, 4, 7, 4]
    assert found["forward_s"] == [0.1, 0.2, 0.3, 0.2]
    assert found["backward_s"] == pytest.approx([0.25, 0.5, 0.75, 0.5])
    text = printed("--links", "links.json")
    assert (
        "not measured: 1 of 12 latencies, 1 of 4 forward times, 1 of 4 memories; the median of "
        "the others stands for them"
    ) in text


@pytest.mark.usefixtures("placed_in_order")
def test_the_documented_file_is_one() -> None:
    page = Path(__file__).resolve().parents[4] / "docs" / "evidence" / "skippipe.md"
    shown = re.search(r"```json\n(.*?)```", page.read_text(), re.DOTALL)
    assert shown is not None
    Path("shown.json").write_text(shown.group(1))
    found = document("--links", "shown.json")
    assert found["stage_peers"] == [["ant"], ["bee", "cat"]]
    assert found["not_measured"] == [
        "2 of 6 rates",
        "1 of 3 forward times",
        "1 of 3 backward times",
    ]


@pytest.mark.usefixtures("placed_in_order")
def test_flags_win_over_the_file() -> None:
    flags = ("--memory", "1", "--microbatches", "3", "--forward-ms", "10")
    found = document("--links", measured(), *flags, "--activation-bytes", "9")
    assert (found["memory"], found["microbatches"]) == ([1] * 4, 3)
    assert (found["forward_s"], found["activation_bytes"]) == ([0.01] * 4, 9)


def test_a_better_placement_is_told_beside_the_one_that_is() -> None:
    """Two sites far apart; stage 1 is all on the other side of stage 0, where lanes could stay."""
    changes = {
        "peers": ["a0", "a1", "a2", "b0", "b1", "b2"],
        "stage": [0, 0, 2, 1, 1, 2],
        "latency_s": [[0.9 if (i < 3) != (j < 3) else 0.001 for j in range(6)] for i in range(6)],
        "rate_bytes_per_s": [[1e7] * 6 for _ in range(6)],
        "forward_s": [0.1] * 6,
        "backward_s": [0.2] * 6,
        "loss_s": [0.02] * 6,
        "memory": [3] * 6,
    }
    found = document("--links", measured(**changes))
    assert found["stage_peers"] == [["a0", "a1"], ["b0", "b1"], ["a2", "b2"]]
    better = found["better_placement"]
    assert [sorted(name[0] for name in stage) for stage in better["stage_peers"]] == [
        ["a", "b"]
    ] * 3
    skip_s = by_routing(better)["skip"]["iteration_s"]
    assert skip_s < 0.5 * by_routing(found)["skip"]["iteration_s"]
    text = printed("--links", "links.json")
    assert "placed better" in text
    assert "placement: with the better one, skip takes" in text


def test_where_none_is_better_that_is_told() -> None:
    alike = {"forward_s": [0.1] * 4, "backward_s": [0.2] * 4, "loss_s": [0.05] * 4}
    assert document("--links", measured(**alike))["better_placement"] is None
    assert "placement: none better was found" in printed("--links", "links.json")


def test_without_stages_in_the_file_peers_are_placed() -> None:
    found = document("--links", measured(stage=...), "--stages", "2")
    assert found["placement"] == "proposed"
    names = [name for replicas in found["stage_peers"] for name in replicas]
    assert sorted(names) == ["ant", "bee", "cat", "dog"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"forward_s": [None] * 4}, "the file has forward_s of no peer; let the swarm run"),
        ({"activation_bytes": None}, "the file has no activation_bytes; add --activation-bytes"),
        ({"stage": ...}, "the file does not say who serves which stage; add --stages N"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_what_the_file_does_not_say_is_asked_for(changes: dict[str, Any], words: str) -> None:
    assert f"--links: {words}" in refused("--links", measured(**changes))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--link", "fast", "--stages", "2"], "--link: link 'fast': 'fast' is no number"),
        (["--link", "9mbit,loss=1", "--stages", "2"], "predicted without jitter and loss"),
        (["--link", "9mbit;8mbit", "--stages", "3"], "--stages 3: 2 peers cannot serve them"),
        (
            ["--link", "9mbit;8mbit;7mbit", "--stages", "3", "--replicas", "2"],
            "--replicas 2 of 3 stages are 6 peers, but there are links of 3",
        ),
        (["--link", "9mbit", "--stages", "9", "--skip", "0.8"], "--skip 0.8: 1 steps of at most 4"),
        (["--link", "9mbit", "--stages", "2", "--skip", "nan"], "--skip is nan; it must be a fin"),
        (["--link", "9mbit", "--stages", "2", "--peers", "4"], "--peers does not go with --stages"),
        (["--link", "9mbit", "--stages", "2", "--step-time", "1"], "--step-time does not go with"),
        (["--link", "9mbit", "--skip", "0.5"], "--skip is about stages; add --stages N"),
        (["--link", "9mbit", "--stages", "2", "--spread", "3"], "--spread 3: routes of 2 of 2"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_flags_are_one_line(args: list[str], words: str) -> None:
    assert words in refused(*args, *(BY_HAND if "--stages" in args else ()))


def test_flags_that_contradict_the_file_are_one_line() -> None:
    file = ("--links", measured())
    assert "--stages 3: the file has 2 stages; leave --stages out" in refused(
        *file, "--stages", "3"
    )
    assert "--replicas: the file says who serves which" in refused(*file, "--replicas", "2")
    assert "links.json has all links; leave the other" in refused(*file, "--link", "9mbit")


def test_more_stages_than_layers_are_refused_with_the_way_out() -> None:
    message = refused("--set", "task.text=text.txt", "--stages", "4", "--link", "9mbit")
    assert message.startswith("--stages 4: 3 layers cannot be cut into 4 stages")
    assert "a larger model, or --forward-ms and --activation-bytes" in message


@pytest.mark.parametrize("args", [["--skip", "1"], ["--memory", "0"], ["--spread", "-1"]])
def test_values_out_of_range_are_usage(args: list[str]) -> None:
    invoked = CliRunner().invoke(plan, ["--stages", "2", "--link", "9mbit", *args])
    assert invoked.exit_code == 2


# ------------------------------------------- how many stages are visited: flags, run, measurements


@pytest.mark.usefixtures("placed_in_order")
def test_unequal_routes_are_told_as_such() -> None:
    Path("run.toml").write_text('[stages]\ncount = 6\nrouting = "skip"\nskip = 0.33\nspread = 1\n')
    arguments = ("run.toml", *BY_HAND, *FEW, "--link", "20mbit")
    found = document(*arguments)
    assert (found["visited"], found["spread"]) == (4, 1)
    for name, lengths in (("full", {6}), ("random", {3, 4, 5}), ("skip", {3, 4, 5})):
        assert {len(route) for route in by_routing(found)[name]["routes"]} <= lengths
    assert {3, 5} <= {len(route) for route in by_routing(found)["skip"]["routes"]}
    assert "routes that skip visit 3 to 5 of 6 stages" in printed(*arguments)
    assert document(*arguments, "--skip", "0")["spread"] == 0
    assert document(*arguments, "--spread", "0")["spread"] == 0
    message = refused(*arguments, "--skip", "0", "--spread", "1")
    assert message.startswith("--skip 0 --spread 1: routes of 6 of 6 stages cannot be unequal")


@pytest.mark.usefixtures("placed_in_order")
def test_the_run_says_how_it_is_cut() -> None:
    Path("run.toml").write_text(
        '[stages]\ncount = 4\nrouting = "skip"\nskip = 0.5\nmicrobatches = 3\n'
    )
    found = document("run.toml", *BY_HAND, *FEW[:2], "--link", "20mbit")
    assert (found["stages"], found["visited"], found["microbatches"]) == (4, 2, 3)
    again = document("run.toml", *BY_HAND, *FEW[:2], "--link", "20mbit", "--skip", "0.25")
    assert again["visited"] == 3


@pytest.mark.usefixtures("placed_in_order")
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
    found = document("run.toml", *BY_HAND, *FEW[:2], "--link", "20mbit", *args)
    assert (found["stages"], found["visited"]) == (int(args[1]), visited)
    assert (found["spread"], found["microbatches"]) == (args[1] == "6", 3)


@pytest.mark.usefixtures("placed_in_order")
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


# ------------------------------------------------------------------------- the file of measurements


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peers": ...}, 'peers must be names, each once, like ["w0", "w1"]'),
        ({"peers": ["ant", "bee", "ant", "dog"]}, "peers must be names"),
        ({"latency_s": ...}, "latency_s: nothing is measured between any two peers"),
        ({"latency_s": [[None] * 4] * 4}, "latency_s: nothing is measured between any two peers"),
        ({"latency_s": [[0.1] * 3] * 4}, "latency_s must be 4 rows of 4 numbers of at least 0"),
        ({"latency_s": [[-1] * 4] * 4}, "latency_s must be 4 rows of 4 numbers of at least 0"),
        ({"rate_bytes_per_s": [[0] * 4] * 4}, "rate_bytes_per_s must be 4 rows of 4 numbers abo"),
        ({"rate_bytes_per_s": [["fast"] * 4] * 4}, "rate_bytes_per_s must be 4 rows of 4 numbers"),
        ({"forward_s": 0.1}, "forward_s must be 4 numbers above 0, with null for what is not"),
        ({"memory": [3, 3, 0, 3]}, "memory must be 4 numbers above 0"),
        ({"activation_bytes": 1.5}, "activation_bytes is 1.5; it must be int, at least 1"),
        ({"microbatches": 0}, "microbatches is 0; it must be int, at least 1"),
        ({"spread": -1}, "spread is -1; it must be int, at least 0"),
        ({"skip": -0.5}, "skip is -0.5; it must be float, at least 0"),
        ({"stage": [0, 1, 0, -1]}, "stage must be a number for each peer"),
        ({"stage": [0, 2, 0, 2]}, "each stage from 0 on needs a peer"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_a_bad_entry_is_one_line(changes: dict[str, Any], words: str) -> None:
    message = refused("--links", measured(**changes))
    assert message.startswith("--links links.json: ")
    assert words in message


@pytest.mark.parametrize(
    ("text", "words"),
    [(None, "cannot be read: No such file"), ("{", "Expecting"), ("[1]", "not an object")],
)
def test_a_file_that_is_none_is_one_line(text: str | None, words: str) -> None:
    if text is not None:
        Path("links.json").write_text(text)
    assert words in refused("--links", "links.json")


def test_one_peer_has_no_links() -> None:
    changes = {"peers": ["ant"], "stage": [0], "latency_s": [[None]], "rate_bytes_per_s": [[None]]}
    alone = {"forward_s": [0.1], "backward_s": [0.2], "loss_s": [0.05], "memory": [None]}
    found = document("--links", measured(**changes, **alone))
    assert (found["stage_peers"], found["memory"], found["not_measured"]) == ([["ant"]], [3], [])


# --------------------------------------------------------------------- which layers to which stage


def sweep(*layers_s: float, outer_s: float = 0.0) -> Floats:
    """A visit takes so long, a quarter of it forward; of what stage 0 has besides, one the loss."""
    rows = [[visit_s / 4, visit_s * 3 / 4, 0.0] for visit_s in layers_s]
    return np.array([*rows, [outer_s / 4, outer_s / 2, outer_s / 4]])


def cuts(*sweeps: Floats, cut: tuple[tuple[int, int], ...] = ((0, 1), (2, 3))) -> StageCuts:
    return compared_cuts(cut, False, *sweeps)


def test_a_slow_head_leaves_stage_0_fewer_layers() -> None:
    found = cuts(*[sweep(1, 1, 1, 1, outer_s=2)] * 2)
    assert (found.own.layers, found.own.visit_s) == ((2, 2), (4, 2))
    assert (found.measured.layers, found.measured.visit_s) == ((1, 3), (3, 3))
    assert cut_remark(found) == (
        "layers by parameters: the slowest stage takes 4 s; better 3 s (-25 %) by "
        "--set 'stages.layers=[1,3]'"
    )


def test_what_the_second_sweep_does_not_bear_out_is_noise() -> None:
    found = cuts(sweep(3, 1, 1, 1), sweep(1, 1, 1, 1))
    assert (found.measured.layers, found.own.visit_s, found.better) == ((1, 3), (2, 2), None)
    assert cut_remark(found).endswith("takes 2 s; no cut by measured time is much better")


@pytest.mark.parametrize(("last_s", "better"), [(1.02, False), (1.2, True)])
def test_a_little_is_no_reason_to_cut_otherwise(last_s: float, better: bool) -> None:
    """The slowest takes 2 + the last one's; by the other cut it is 3 seconds."""
    found = cuts(*[sweep(1, 1, 1, 1, last_s)] * 2, cut=((0, 1), (2, 4)))
    assert found.measured.layers == (3, 2)
    assert (found.better is not None) is better


@pytest.fixture
def slow_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of three layers takes as long as the rest of the model."""
    sweeps = iter([sweep(0.1, 0.1, 0.28, outer_s=0.04)] * 2)
    monkeypatch.setattr("murmuration.worker.cli.plan_model._sweep", lambda *_: next(sweeps))


TIMED = ("--set", "task.text=text.txt", "--link", "20mbit", "--stages", "2")


@pytest.mark.usefixtures("slow_end")
def test_the_cut_and_a_better_one_are_told() -> None:
    found = document(*TIMED)
    cut = found["cut"]
    assert (cut["layers"], cut["source"]) == ([1, 2], "parameters")
    assert cut["visit_s"] == pytest.approx([0.14, 0.38])
    assert cut["better"]["layers"] == [2, 1]
    assert cut["better"]["visit_s"] == pytest.approx([0.24, 0.28])
    # Forward times are those of the run's own cut, and the loss is stage 0's.
    assert sorted(found["forward_s"]) == pytest.approx([0.14 / 4] * 2 + [0.38 / 4] * 2)
    assert found["loss_s"] == pytest.approx([0.01] * 4)


@pytest.mark.usefixtures("slow_end")
def test_for_people_there_is_a_table_and_the_setting() -> None:
    lines = printed(*TIMED).splitlines()
    assert ["0", "1", "140", "ms", "2", "240", "ms"] in [line.split() for line in lines]
    assert (
        "  layers by parameters: the slowest stage takes 380 ms; better 280 ms (-26 %) by "
        "--set 'stages.layers=[2,1]'"
    ) in lines


@pytest.mark.usefixtures("slow_end")
@pytest.mark.parametrize(
    ("layers", "own", "source"),
    [((), [1, 2], "parameters"), (("--set", "stages.layers=[2,1]"), [2, 1], "settings")],
)
def test_layers_of_a_run_of_other_stages_are_not_planned_with(
    layers: tuple[str, ...], own: list[int], source: str
) -> None:
    Path("run.toml").write_text("[stages]\ncount = 3\nlayers = [1, 1, 1]\n")
    found = document("run.toml", *TIMED, *layers)
    assert (found["cut"]["layers"], found["cut"]["source"]) == (own, source)


@pytest.mark.parametrize(
    ("stages", "layers", "words"),
    [
        ("3", "[2,1]", "--set stages.layers=[2,1]: [stages] layers is [2, 1], of 2 stages, but"),
        ("2", "[2,2]", "[stages] count = 2: layers is [2, 2], 4 in all, but the model has 3"),
    ],
)
def test_layers_that_do_not_fit_are_one_line(stages: str, layers: str, words: str) -> None:
    given = ("--stages", stages, "--set", f"stages.layers={layers}")
    assert words in commands.refused(plan, 3, *TIMED[:4], *given)
