"""The parts of a model that travel, and what rounds make of running statistics."""

from unittest.mock import Mock

import pytest
import torch
from torch import nn

from murmuration.algorithms.fragment_state import RoundResult
from murmuration.algorithms.fragments import Fragment, partition
from murmuration.algorithms.plan import PRESETS
from murmuration.worker.training.fragment import FragmentReplica
from murmuration.worker.training.model import running_statistics, schema_of


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


def test_saved_buffers_travel_with_integers_last_and_others_do_not():
    model = normalised()
    model.register_state_dict_pre_hook(Mock(side_effect=AssertionError))  # may wait for all ranks
    model.register_buffer("table", torch.ones(4), persistent=False)
    model.register_buffer("places", torch.arange(4).expand(3, 4))  # nothing can write to it
    own = ["0.weight", "0.bias", "1.weight", "1.bias"]
    averaged = ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    names = [(name, False) for name in own] + [(name, True) for name in averaged]
    assert [(s.name, s.averaged) for s in schema_of(model)] == names
    assert [s.integers for s in schema_of(model) if s.integers] == [torch.int64]
    assert not any(spec.averaged for spec in schema_of(model, statistics=False))


def replica_of(model: nn.Module, preset: str) -> tuple[FragmentReplica, Fragment]:
    (fragment,) = partition(schema_of(model), 1)
    named = dict(model.named_parameters()) | running_statistics(model)
    values = {name: value.detach() for name, value in named.items()}
    return FragmentReplica(fragment, PRESETS[preset], values), fragment


@pytest.mark.parametrize("preset", ["diloco", "noloco"])
def test_the_new_anchor_has_the_mean_of_the_statistics_and_no_momentum_of_them(preset):
    each, fragment = replica_of(normalised(), preset)
    assert (fragment.averaged, fragment.exact) == (((15, 25),), 4)
    before, g = each.state.anchor, torch.arange(25.0)
    each.contribute(g, step=1)
    middle = before + 1 if preset == "noloco" else None
    result = RoundResult(0, g.clone(), 2, ("a", "b"), (), mean_anchor=middle)
    each.write(each.apply(result, each.local))
    start = before if middle is None else middle
    assert torch.equal(each.state.anchor[15:], start[15:] - g[15:])
    assert not each.state.momentum[15:].any()
    assert each.state.momentum[1:15].any()


def test_a_variance_is_never_below_zero():
    model = normalised()
    each, _ = replica_of(model, "diloco")
    each.write(each.state.anchor - 5)
    assert torch.equal(model[1].running_var, torch.zeros(3))
    assert torch.equal(model[1].running_mean, torch.full((3,), -5.0))


def test_a_peer_whose_integers_were_taken_goes_on_from_its_own():
    """It has counted on meanwhile; the others take what it had sent."""
    counts = {"first": 1 << 40, "second": 7}
    models = {name: normalised() for name in counts}
    replicas = {name: replica_of(model, "streaming")[0] for name, model in models.items()}
    contributed = {}
    for name, each in replicas.items():
        models[name][1].num_batches_tracked.fill_(counts[name])
        g = each.state.anchor - each.local
        contributed[name] = each.contribute(g, step=1).values
        models[name][1].num_batches_tracked.add_(3)
    for each in replicas.values():
        each.finish(RoundResult(0, contributed["first"].clone(), 2, ("first", "second"), ()))
    assert models["first"][1].num_batches_tracked == (1 << 40) + 3
    assert models["second"][1].num_batches_tracked == 1 << 40
    for each in replicas.values():
        assert each.fragment.named(each.state.anchor)["1.num_batches_tracked"] == 1 << 40
        assert each.held(copied=False)["1.num_batches_tracked"].dtype is torch.int64


INF, NAN = torch.inf, torch.nan


class Placeholders(nn.Module):
    def __init__(self, values: list[float], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("table", torch.tensor(values, dtype=dtype))


def rounds_of(*peers: FragmentReplica) -> None:
    """A round of all of them, which are in one plan of means."""
    gs = [each.as_held(each.state.anchor) - each.local for each in peers]
    sent = [each.contribute(g, step=1).values for each, g in zip(peers, gs, strict=True)]
    for each in peers:
        mean = torch.stack(sent).mean(0)
        each.finish(RoundResult(each.state.version, mean, len(peers), ("a", "b"), ()))


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([1.0, -INF], [3.0, -INF], [2.0, -INF]),  # a mask
        ([NAN, NAN], [NAN, NAN], [NAN, NAN]),  # a placeholder that is never filled
        ([1.0, 2.0], [NAN, 4.0], [1.0, 3.0]),  # of a peer that takes over the first one's
        ([1.0, -3e38], [3.0, -3e38], [2.0, -3e38]),  # a mask of the least that fp32 holds
        ([0.0, 1e20], [0.0, INF], [0.0, None]),  # each keeps its own
        ([NAN, 1.0], [5.0, 3.0], [None, 2.0]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("preset", ["diloco", "streaming"])
def test_what_is_no_number_stays_and_the_rest_is_averaged(preset, dtype, first, second, expected):
    models = [Placeholders(values, dtype) for values in (first, second)]
    replicas = [replica_of(model, preset)[0] for model in models]
    replicas[1].take_over(replicas[0].state, keep=False)  # all begin with the first one's
    for model, values in zip(models, (first, second), strict=True):
        finite = torch.tensor(values).abs() < 1e15
        model.table[finite] = torch.tensor(values, dtype=dtype)[finite]
    for _ in range(3):
        rounds_of(*replicas)
    for model, own in zip(models, (first, second), strict=True):
        wanted = [o if e is None else e for o, e in zip(own, expected, strict=True)]
        torch.testing.assert_close(
            model.table, torch.tensor(wanted, dtype=dtype), equal_nan=True, rtol=0.1, atol=0.1
        )
    assert torch.equal(replicas[0].state.anchor, replicas[1].state.anchor)
    assert all(each.state.anchor.isfinite().all() for each in replicas)
    assert replicas[0].at_home | replicas[1].at_home == {"table"}


def test_what_becomes_no_number_later_stays_so_but_of_a_normalisation():
    model = normalised().append(Placeholders([1.0, 2.0]))
    each, _ = replica_of(model, "diloco")
    for values in (model[1].running_mean, model[2].table):
        values[0] = NAN
    rounds_of(each)
    assert model[1].running_mean.tolist() == [0.0] * 3
    assert str(model[2].table.tolist()) == "[nan, 2.0]"
    assert each.at_home == {"1.running_mean", "2.table"}
    model[2].table[0] = 7.0  # a number again
    rounds_of(each)
    assert model[2].table.tolist() == [7.0, 2.0]
    assert each.state.anchor.isfinite().all()


def test_an_average_in_fp16_stays_within_what_that_holds():
    model = Placeholders([60_000.0, 1.0], torch.float16)
    each, fragment = replica_of(model, "diloco")
    values = each.state.anchor.clone()
    fragment.views(values)["table"].copy_(torch.tensor([70_000.0, -70_000.0]))
    each.write(values)
    assert model.table.tolist() == [65504.0, -65504.0]


def test_a_checkpoint_holds_a_peers_own_where_nobody_shares():
    model = Placeholders([-INF, 1.0])
    each, _ = replica_of(model, "diloco")
    for copied in (True, False):
        assert each.held(copied=copied)["table"].tolist() == [-INF, 1.0]
