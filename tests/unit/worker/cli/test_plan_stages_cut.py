"""`murmur plan --stages`: which layers to which stage, by what they take and need."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from murmuration.worker.cli.plan import plan
from murmuration.worker.cli.plan_stages_cut import (
    LayerCost,
    StageCuts,
    StagedModel,
    Sweep,
    _graph_bytes,
    cuts_of,
)
from murmuration.worker.cli.plan_stages_report import cut_remark
from murmuration.worker.errors import UsageError
from murmuration.worker.tasks import Batch, StageModule
from tests.support import commands

MIB = 2**20


def sweep(
    *layers_s: float, outer_s: float = 0.0, graph_bytes: int = 0, outer_graph_bytes: int = 0
) -> Sweep:
    """A visit takes so long, a quarter of it forward; of what stage 0 has besides, one the loss."""
    layers = (
        LayerCost(forward_s=visit_s / 4, backward_s=visit_s * 3 / 4, graph_bytes=graph_bytes)
        for visit_s in layers_s
    )
    outer = LayerCost(
        forward_s=outer_s / 4,
        backward_s=outer_s / 2,
        loss_s=outer_s / 4,
        graph_bytes=outer_graph_bytes,
    )
    return Sweep(layers=tuple(layers), outer=outer)


def model(*sweeps: Sweep, cut: Sequence[tuple[int, int]], size: int = 0) -> StagedModel:
    return StagedModel(
        cut=tuple(cut),
        from_settings=False,
        layer_sizes=(size,) * len(sweeps[0].layers),
        outer_size=2 * size,
        activation_bytes=MIB,
        sweeps=sweeps,
    )


def cuts(
    *sweeps: Sweep, cut: Sequence[tuple[int, int]], limit_bytes: int | None = None
) -> StageCuts:
    return cuts_of(model(*sweeps, cut=cut), held=1, committed=2, limit_bytes=limit_bytes)


EVEN = ((0, 1), (2, 3))


# ------------------------------------------------------------------------------- what is better


def test_a_slow_head_leaves_stage_0_fewer_layers() -> None:
    found = cuts(*[sweep(1, 1, 1, 1, outer_s=2)] * 2, cut=EVEN)
    assert (found.own.layers, found.own.visit_s) == ((2, 2), (4, 2))
    assert found.better == found.measured
    assert (found.measured.layers, found.measured.visit_s) == ((1, 3), (3, 3))
    assert cut_remark(found) == (
        "layers by parameters: the slowest stage takes 4 s; better 3 s (-25 %) by "
        "--set 'stages.layers=[1,3]'"
    )


def test_what_the_second_sweep_does_not_bear_out_is_noise() -> None:
    noisy, calm = sweep(3, 1, 1, 1), sweep(1, 1, 1, 1)
    found = cuts(noisy, calm, cut=EVEN)
    assert found.measured.layers == (1, 3)
    assert found.own.visit_s == (2, 2)
    assert found.better is None
    assert cut_remark(found).endswith("takes 2 s; no cut by measured time is much better")


@pytest.mark.parametrize(("last_s", "better"), [(1.02, False), (1.2, True)])
def test_a_little_is_no_reason_to_cut_otherwise(last_s: float, better: bool) -> None:
    """The slowest takes 2 + the last one's; by the other cut it is 3 seconds."""
    found = cuts(*[sweep(1, 1, 1, 1, last_s)] * 2, cut=((0, 1), (2, 4)))
    assert found.measured.layers == (3, 2)
    assert (found.better is not None) is better


def test_the_visits_are_those_of_the_runs_own_cut() -> None:
    visits = model(sweep(9, 9, 9, 9), sweep(4, 4, 8, 8, outer_s=2), cut=EVEN).visits()
    assert visits.forward_s.tolist() == [2.5, 4.0]
    assert visits.backward_s.tolist() == [7.0, 12.0]
    assert visits.loss_s[0] == 0.5


# -------------------------------------------------------------------------------------- memory


def test_a_stage_needs_its_parameters_six_times_a_graph_and_what_is_in_flight() -> None:
    one = sweep(1, 1, 1, graph_bytes=100, outer_graph_bytes=7)
    staged = model(one, one, cut=((0, 1), (2, 2)), size=1000)
    found = cuts_of(staged, held=3, committed=2, limit_bytes=None)
    in_flight = 3 * 2 * 3 * MIB  # visits, there and back, of three tensors each
    assert found.own.memory_bytes == (
        (2000 + 2 * 1000) * 24 + 2 * 100 + 7 + in_flight,
        1000 * 24 + 100 + in_flight,
    )


def test_memory_bounds_the_cut_even_where_that_is_slower() -> None:
    """In flight are 6 MiB; the graphs of the layers take 10 MiB each, that of the head 10."""
    one = sweep(1, 1, 1, 1, graph_bytes=10 * MIB, outer_graph_bytes=10 * MIB)
    assert cuts(one, one, cut=EVEN).better is None
    assert cuts(one, one, cut=EVEN, limit_bytes=36 * MIB).better is None
    found = cuts(one, one, cut=((0, 2), (3, 3)), limit_bytes=37 * MIB)
    assert not found.own_fits
    assert found.better is not None
    assert found.better.layers == (2, 2)
    tight = cuts(one, one, cut=EVEN, limit_bytes=36 * MIB)
    assert tight.measured.memory_bytes == (36 * MIB, 26 * MIB)
    with pytest.raises(UsageError, match=r"^--stage-mib: stage 0 with embedding, norm, head and"):
        cuts(one, one, cut=EVEN, limit_bytes=25 * MIB)
    with pytest.raises(UsageError, match="2 stages of 35 MiB hold layers 0 to 2 at most: layer 3"):
        cuts(one, one, cut=EVEN, limit_bytes=35 * MIB)


def test_a_cut_that_does_not_fit_is_told_with_one_that_does() -> None:
    one = sweep(1, 1, 1, 1, graph_bytes=10 * MIB, outer_graph_bytes=20 * MIB)
    found = cuts(one, one, cut=EVEN, limit_bytes=40 * MIB)
    assert cut_remark(found) == (
        "layers by parameters: the slowest stage takes 2 s, the largest needs more than 41.9 MB; "
        "better 3 s (+50 %) by --set 'stages.layers=[1,3]'"
    )


class Squares(StageModule):
    """Saves what enters it, and its weight, for the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * hidden * self.weight

    def embed(self, batch: Batch) -> Tensor:
        raise NotImplementedError

    def loss(self, hidden: Tensor, batch: Batch) -> Tensor:
        raise NotImplementedError


def test_what_autograd_keeps_is_counted_once_and_without_parameters() -> None:
    module = Squares()
    # What enters is saved twice, and its square once.
    assert _graph_bytes(module, torch.ones(3, 5), module) == 2 * 3 * 5 * 4


# ----------------------------------------------------------------------------- on the command line


@pytest.fixture(autouse=True)
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("murmuration.worker.cli.plan_stages.EFFORT_S", 0.02)
    (tmp_path / "text.txt").write_text("some text to learn from. " * 200)


@pytest.fixture
def slow_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of three layers takes as long as the rest of the model."""
    sweeps: Iterator[Sweep] = iter([sweep(0.1, 0.1, 0.28, outer_s=0.04)] * 2)
    monkeypatch.setattr("murmuration.worker.cli.plan_stages_cut._sweep", lambda *_: next(sweeps))


ARGS = ("--set", "task.text=text.txt", "--link", "20mbit")


def document(*args: str) -> dict[str, Any]:
    return json.loads(commands.printed(plan, *ARGS, *args, "--json"))


def refused(*args: str, code: int = 2) -> str:
    return commands.refused(plan, code, *ARGS, *args)


@pytest.mark.usefixtures("slow_end")
def test_the_cut_and_a_better_one_are_told() -> None:
    found = document("--stages", "2")
    cut = found["cut"]
    assert (cut["layers"], cut["source"], cut["fits"]) == ([1, 2], "parameters", True)
    assert cut["visit_s"] == pytest.approx([0.14, 0.38])
    assert cut["better"]["layers"] == [2, 1]
    assert cut["better"]["visit_s"] == pytest.approx([0.24, 0.28])
    assert sorted(found["forward_s"]) == pytest.approx([0.14 / 4] * 2 + [0.38 / 4] * 2)


@pytest.mark.usefixtures("slow_end")
def test_for_people_there_is_a_table_and_the_setting() -> None:
    lines = commands.printed(plan, *ARGS, "--stages", "2").splitlines()
    (row,) = [line.split() for line in lines if line.startswith("      0") and " MB" in line]
    assert (row[:4], row[6:9]) == (["0", "1", "140", "ms"], ["2", "240", "ms"])
    assert (
        "  layers by parameters: the slowest stage takes 380 ms; better 280 ms (-26 %) by "
        "--set 'stages.layers=[2,1]'"
    ) in lines


@pytest.mark.usefixtures("slow_end")
def test_the_setting_that_is_proposed_can_be_planned_with() -> None:
    found = document("--stages", "2", "--set", "stages.layers=[2,1]")
    assert (found["cut"]["layers"], found["cut"]["source"]) == ([2, 1], "settings")
    assert found["cut"]["better"] is None
    assert sorted(found["forward_s"]) == pytest.approx([0.24 / 4] * 2 + [0.28 / 4] * 2)


@pytest.mark.usefixtures("slow_end")
@pytest.mark.parametrize(
    ("layers", "own", "source"),
    [((), [1, 2], "parameters"), (("--set", "stages.layers=[2,1]"), [2, 1], "settings")],
)
def test_layers_of_a_run_of_other_stages_are_not_planned_with(
    layers: tuple[str, ...], own: list[int], source: str
) -> None:
    Path("run.toml").write_text("[stages]\ncount = 3\nlayers = [1, 1, 1]\n")
    found = document("run.toml", "--stages", "2", *layers)
    assert (found["cut"]["layers"], found["cut"]["source"]) == (own, source)


def test_a_cut_of_the_run_says_nothing_of_skips() -> None:
    given = ("--forward-ms", "9", "--link", "20mbit", "--json")
    layers = ("--set", "stages.layers=[1,1,1,1]", "--activation-bytes", "9")
    found = json.loads(commands.printed(plan, *given, "--stages", "4", *layers))
    assert found["skip"] == 0.25


@pytest.mark.usefixtures("slow_end")
def test_memory_that_no_cut_fits_is_refused() -> None:
    message = refused("--stages", "2", "--stage-mib", "2")
    assert message.startswith("--stage-mib: stage 0 with embedding, norm, head and layer 0 alone")
    assert message.endswith(
        "take more stages, fewer microbatches in flight (--memory), or smaller batches"
    )


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["--stages", "2", "--stage-mib", "9", "--forward-ms", "5"], 2, "--stage-mib bounds a cut"),
        (["--stage-mib", "9"], 2, "--stage-mib is about stages; add --stages N"),
        (["--stages", "2", "--stage-mib", "nan"], 2, "--stage-mib is nan; it must be a finite"),
        (
            ["--stages", "3", "--set", "stages.layers=[2,1]"],
            3,
            "--set stages.layers=[2,1]: [stages] layers is [2, 1], of 2 stages, but count is 3",
        ),
        (
            ["--stages", "2", "--set", "stages.layers=[2,2]"],
            3,
            "[stages] count = 2: layers is [2, 2], 4 in all, but the model has 3",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_flags_are_one_line(args: list[str], code: int, words: str) -> None:
    assert words in refused(*args, code=code)
