"""A swarm of one, in this process: what a loop sees of it."""

import argparse
import doctest
import json
import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

import murmuration
from murmuration import ConfigError, IdentityError, PeersUnreachable, Swarm, UsageError
from murmuration.algorithms.fragments import Fragment, TensorSpec
from murmuration.worker.library.site import Site
from murmuration.worker.node import admission
from murmuration.worker.training import optimizers
from murmuration.worker.training.outer_state import unpacked
from tests.support.peers import row
from tests.support.refusals import one_line
from tests.support.workers import free_addresses
from tests.unit.worker.library.test_share import Stateful

EITHER = (ConfigError, UsageError)


def model_of(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1).to(dtype)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def loss_of(model: nn.Module, samples: int = 2) -> torch.Tensor:
    weight = next(model.parameters())
    return model(torch.ones(samples, 4, dtype=weight.dtype)).sum()


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss_of(model).backward()
    optimizer.step()
    optimizer.zero_grad()


def values(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().float().flatten() for p in model.parameters()])


def events(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("preset", ["diloco", "local"])
@row("a Swarm that is entered twice", "refused", "make one for each block")
def test_the_block_ends_with_the_anchor_and_the_anchor_can_be_looked_at_before(preset):
    """Where nothing is exchanged, that is the model."""
    model, optimizer = model_of()
    start = values(model)
    with Swarm(model, optimizer, preset=preset, inner_steps=4, steps=6, name="me") as swarm:
        assert (swarm.peers, swarm.is_first, swarm.step) == (("me",), True, 0)
        for _ in range(2):
            one_step(model, optimizer)
        local = values(model)
        with swarm.anchor() as at_anchor:
            assert torch.equal(values(at_anchor), start if preset == "diloco" else local)
            with swarm.anchor():  # which ends no outer one
                pass
            with pytest.raises(UsageError, match=r"within swarm\.anchor\(\)"):
                one_step(model, optimizer)
        assert torch.equal(values(model), local)
        while not swarm.done:
            one_step(model, optimizer)
        assert swarm.metrics["rounds_completed"] == (2 if preset == "diloco" else 0)
    assert swarm.peers == ("me",)
    (fragment,) = swarm.state_dict()["fragments"]
    assert torch.equal(values(model), fragment["anchor"])
    with pytest.raises(UsageError, match="entered before"), swarm:
        pass


@row("a peer without others", "shared", "the model keeps what it has learned since the last round")
def test_a_loop_without_an_end_ends_with_its_block(tmp_path):
    model, optimizer = model_of()
    with Swarm(model, optimizer, inner_steps=2, out=tmp_path / "deep" / "er") as swarm:
        for _, _ in zip(range(5), swarm.shard(range(100)), strict=False):
            one_step(model, optimizer)
        assert swarm.step == 5
        held = values(model)
        with Swarm(*model_of(), out=tmp_path / "deep" / "er"):
            pass
        with one_line(ConfigError, r"er': another peer writes there; take a folder"):
            Swarm(*model_of(), out=tmp_path / "deep" / "er", listen="0.0.0.0:0").__enter__()
    assert torch.equal(held, values(model))
    found = events(tmp_path / "deep" / "er")
    assert ([e["event"] for e in found].count("round"), found[-1]["unsent_steps"]) == (2, 1)
    told = [event["text"] for event in found if event["event"] == "warning"]
    assert ["another peer writes there" in text for text in told] == [True, False]


def test_an_exception_leaves_the_parameters_as_they_are():
    """Such as that of a step whose model has got another parameter."""
    model, optimizer = model_of()
    swarm = Swarm(model, optimizer, steps=9)
    swarm.__enter__()
    one_step(model, optimizer)
    seen = values(model)
    model.add_module("extra", nn.Linear(2, 2))
    with one_line(UsageError, r"'extra\.weight' was added"):
        optimizer.step()
    del model.extra
    swarm.__exit__(UsageError, UsageError(), None)
    assert torch.equal(values(model), seen)
    with Swarm(model, optimizer, steps=1):  # and the model is free again
        one_step(model, optimizer)


@row("gradients that no step has, as of a last window", "told", "step once more, in the block")
def test_accumulated_gradients_and_skipped_steps_are_no_steps_of_the_swarms(tmp_path):
    model, optimizer = model_of()
    with Swarm(model, optimizer, inner_steps=2, out=tmp_path) as swarm:
        for number in range(7):
            loss_of(model).backward()
            if number % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
        assert (swarm.step, swarm.metrics["rounds_completed"]) == (2, 1)
    d, g = (torch.optim.SGD([each], lr=0.1) for each in model.parameters())
    with Swarm(model, [d, g], out=tmp_path):
        for each in (d, d, g, d, d, g):  # the last one leaves gradients of d's, as in a GAN
            one_step(model, each)
    assert (tmp_path / "events.jsonl").read_text().count("gradients came after") == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_pseudo_gradient_of_halves_is_without_the_anchors_rounding(dtype):
    model, optimizer = model_of(dtype)
    with Swarm(model, optimizer, inner_steps=1, steps=3, settings={"diloco.outer_momentum": 0.0}):
        for _ in range(3):
            optimizer.step()  # without a gradient nothing moves
    again, _ = model_of(dtype)
    assert torch.equal(values(model), values(again))
    assert next(model.parameters()).dtype is dtype


def test_bad_arguments_are_one_line():
    for given, error, says in [
        ({"preset": "dilocco"}, ConfigError, r"preset='dilocco': no preset .*mean 'diloco'"),
        ({"settings": {"diloco.codek": "e3m0"}}, ConfigError, r"settings\['diloco.codek'\]"),
        ({"settings": {"run.evaluate_every": 5}}, EITHER, "your own evaluates by itself"),
        ({"inner_step": 5}, UsageError, "no argument inner_step; did you mean 'inner_steps'"),
        ({"metrics": 9100}, UsageError, "no argument metrics; did you mean 'serve_metrics'"),
        ({"preset": "kseed"}, ConfigError, "preset='kseed' is for tasks"),
        ({"listen": "0.0.0.0:7700"}, ConfigError, "name a folder to keep it in with out="),
        ({"listen": "0.0.0.0:7700", "join": "127.0.0.1:1"}, ConfigError, "needs a token"),
        ({"token": "murmur1.x"}, IdentityError, "this is no token"),
        ({"advertise": "0.0.0.0:7700"}, UsageError, "nobody can dial"),
        ({"web": "0.0.0.0:0"}, EITHER, "readers show a token, .* in a folder: say out="),
    ]:
        with one_line(error, says):
            Swarm(*model_of(), **given)


@row("modules that are registered in another order (from a `set`)", "refused", "by all but one")
def test_another_model_than_the_runs_is_said_on_both_sides(caplog):
    other, (turned, optimizer) = nn.Linear(5, 1), model_of()
    turned._parameters = dict(reversed(turned._parameters.items()))
    with Swarm(*model_of()) as swarm:
        says = r"tensors\.weight\[1\]: 5 here, 4 there; build the same one"
        with one_line(murmuration.ManifestRefused, says):
            Swarm(other, torch.optim.SGD(other.parameters(), lr=0.1), join=swarm.address)
        with one_line(
            murmuration.ManifestRefused, r"trains another model: tensors: in another order"
        ):
            Swarm(turned, optimizer, join=swarm.address)
    said = "the manifests differ in tensors.weight[1]: 5 in the joiner's, 4 in this run's"
    assert [m for m in caplog.messages if "not let in" in m] == [
        f"warning: a peer at 127.0.0.1 was not let in: {said}"
    ], "once for each peer, and strangers are one"


def test_a_second_swarm_around_one_model_is_one_line_and_leaves_the_first_alone():
    """Also around a wrapper of the model."""
    model, optimizer = model_of()
    compiled = torch.compile(model, backend="eager")
    with Swarm(model, optimizer, steps=2) as first:
        one_step(model, optimizer)
        again = torch.optim.SGD(compiled.parameters(), lr=0.1)
        for second in ((model, optimizer), (compiled, again)):
            with one_line(UsageError, "this model is in a swarm already"), Swarm(*second):
                pass
        one_step(model, optimizer)
        assert first.done


def test_a_swarm_whose_name_is_gone_can_be_left():
    model, optimizer = model_of()
    first = Swarm(model, optimizer).__enter__()
    with pytest.raises(UsageError, match=r"by murmuration\.Swarm\.leave_all\(\)$"):
        Swarm(model, optimizer).__enter__()
    Swarm.leave_all()
    first.__exit__(None, None, None)  # it has left
    with Swarm(model, optimizer):
        one_step(model, optimizer)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's of itself
def test_a_compiled_step_is_followed_without_a_warning_of_the_compilers(caplog):
    model, optimizer = model_of()
    step = torch.compile(optimizer.step, backend="eager")
    with caplog.at_level(logging.WARNING), Swarm(model, optimizer, inner_steps=1) as swarm:
        for _ in range(2):
            loss_of(model).backward()
            step()
    assert swarm.step == 2
    assert "Graph break" not in caplog.text


def test_what_is_told_before_the_block_is_in_the_log(tmp_path, monkeypatch):
    monkeypatch.setattr(admission, "_TELL_S", 0.0)
    (address,) = free_addresses(1)
    (tmp_path / "members.json").write_text("{")
    with pytest.raises(PeersUnreachable) as caught:
        Swarm(*model_of(), join=address, wait_s=2.0, out=tmp_path)
    told = events(tmp_path)
    assert "members.json is damaged or cannot be read" in told[0]["text"]
    assert told[1]["text"].startswith(f"nobody answers yet: {address}")
    text = str(caught.value)
    assert "if the run is over, begin another without join=" in text, "as the library says it"


def test_what_no_site_can_do_is_told():
    fragment = Fragment(0, (TensorSpec("mine", (2,)), TensorSpec("another's", (2,))))
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    with pytest.raises(UsageError, match=r"\"another's\" is not of shards .* no pipeline"):
        Site([fragment], {"mine": torch.zeros(2)})
    threads = {*Path("/proc/self/task").iterdir()}
    Site([], {})
    assert {*Path("/proc/self/task").iterdir()} == threads  # one left would abort the process
    model = fully_shard(model_of()[0])
    with pytest.raises(UsageError, match="use diloco or streaming between sites"):
        Swarm(model, torch.optim.SGD(model.parameters(), lr=0.1), preset="ddp")
    distributed.destroy_process_group()


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_scaler_skips_is_no_step_of_the_swarms(fused):
    model, _ = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with Swarm(model, optimizer, inner_steps=2) as swarm:
        for factor in (1.0, float("inf"), 1.0):
            scaler.scale(loss_of(model) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert swarm.step == 2


@pytest.mark.parametrize("unscaled", [False, True])
def test_scaled_gradients_are_one_line_where_gradients_are_averaged(unscaled):
    model, _ = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with Swarm(model, optimizer, preset="ddp") as swarm:
        scaler.scale(loss_of(model)).backward()
        if unscaled:
            scaler.unscale_(optimizer)
        with nullcontext() if unscaled else one_line(UsageError, r"call scaler\.unscale_"):
            scaler.step(optimizer)
            assert swarm.step == 1


def test_sparse_gradients_are_one_line_where_gradients_are_averaged():
    model = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Swarm(model, optimizer, preset="ddp"):
        model(torch.tensor([1])).sum().backward()
        with one_line(UsageError, "'weight' has a sparse gradient"):
            optimizer.step()


def test_gradients_that_a_closure_computes_are_refused_where_they_are_averaged():
    model, optimizer = model_of()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    with Swarm(model, optimizer, preset="diloco", inner_steps=2, steps=2) as swarm:
        while not swarm.done:
            optimizer.step(closure)
    refused = pytest.raises(UsageError, match="preset ddp averages gradients before")
    with refused, Swarm(model, optimizer, preset="ddp", steps=2):
        optimizer.step(closure)


def test_tied_weights_are_trained_as_one():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Swarm(model, optimizer, inner_steps=1, steps=2) as swarm:
        while not swarm.done:
            one_step(model, optimizer)
    assert model[1].weight is model[0].weight
    (fragment,) = swarm.state_dict()["fragments"]
    assert torch.equal(fragment["anchor"], model[0].weight.detach().flatten())


def test_everything_public_is_documented_and_the_examples_are_right():
    assert all(getattr(murmuration, name).__doc__ for name in murmuration.__all__)
    assert doctest.testmod(murmuration) == doctest.testmod(optimizers) == (0, 5)
    with pytest.raises(AttributeError, match="no attribute 'torchtitan'"):
        murmuration.torchtitan  # noqa: B018


def test_a_loop_of_ones_own_can_serve_metrics():
    model, optimizer = model_of()
    told: list[str] = []
    with Swarm(model, optimizer, inner_steps=2, steps=4, name="me", serve_metrics=0) as swarm:
        swarm.report(1.5)
        one_step(model, optimizer)
        assert swarm._session is not None
        (server,) = swarm._session._servers
        # The I/O thread hears of the step some time after it.
        while 'murmuration_learning_rate{peer="me"} 0.01' not in told:
            with urlopen(f"{server.url}metrics") as answer:
                told = answer.read().decode().splitlines()
    assert 'murmuration_members{health="alive",peer="me"} 1.0' in told


def test_a_loop_of_ones_own_tells_the_norm_of_its_gradient(tmp_path):
    model, optimizer = model_of()
    with Swarm(model, optimizer, steps=2, out=tmp_path):
        one_step(model, optimizer)
        loss_of(model, samples=3).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    steps = [e for e in events(tmp_path) if e.get("state") == "training" and e.get("step")]
    told = [event["gradient_norm"] for event in steps]
    assert told[0] == pytest.approx(2 * 5**0.5)  # of four weights and a bias, over two samples
    assert told[-1] == pytest.approx(0.5, abs=1e-5)


def test_a_loop_of_ones_own_serves_the_page_and_says_whether_it_is_relayed_and_relays():
    parser = argparse.ArgumentParser()
    murmuration.add_arguments(parser)
    typed = parser.parse_args(["--web", "0", "--no-relay", "--relay-mbps", "5"])
    with Swarm(*model_of(), steps=4, **vars(typed)) as swarm:
        assert swarm._session is not None
        (page,) = swarm._session._servers
        with urlopen(page.url) as answer:
            assert answer.status == 200
        assert (swarm._node.relayed, swarm._node.relay_mbps) == (False, 5)
        assert swarm._session.io.node.relay.table._rate_mbps == 5


@pytest.mark.parametrize("source", [lambda: range(40), lambda: Stateful(40)], ids=["list", "state"])
def test_samples_are_gone_on_with_where_the_checkpoint_was(source):
    def drawn(swarm: Swarm, most: int) -> list[int]:
        found = []
        for sample in swarm.shard(data, block=4):
            one_step(model, optimizer)
            found.append(sample)
            if len(found) == most:
                break
        return found

    settings = {"preset": "diloco", "inner_steps": 2}
    (model, optimizer), data = model_of(), source()
    with Swarm(model, optimizer, **settings) as first:
        before = drawn(first, 14)
        saved = first.state_dict()
        lost = drawn(first, 9)
    assert unpacked(first.state_dict())["samples"] != unpacked(saved)["samples"]
    (model, optimizer), data = model_of(), source()
    second = Swarm(model, optimizer, **settings)
    second.load_state_dict(saved)
    with second:
        rest = drawn(second, 40)
    assert sorted([*before, *rest]) == list(range(40))
    assert getattr(data, "read", 26) == 26
    assert set(lost) <= set(rest)


def test_samples_are_shared_inside_the_block_only():
    swarm = Swarm(*model_of())
    with pytest.raises(UsageError, match="inside of the `with` block"):
        swarm.shard(range(3))
    with swarm:
        loop = swarm.shard(range(200))
        assert next(loop) == 0
    assert list(loop) == []


def test_an_average_that_a_loop_keeps_stays_as_it_is():
    model, optimizer = model_of()
    with Swarm(model, optimizer, steps=4, inner_steps=2) as swarm:
        average = torch.optim.swa_utils.AveragedModel(model)
        while not swarm.done:
            one_step(model, optimizer)
            average.update_parameters(model)
        kept = values(average)
    assert torch.equal(values(average), kept)
    assert not torch.equal(values(model), kept)


def test_steps_after_the_run_are_told_once(caplog):
    model, optimizer = model_of()
    with Swarm(model, optimizer, inner_steps=2, steps=2) as swarm:
        for _ in range(5):
            one_step(model, optimizer)
    assert sum("further steps are nobody's" in line for line in caplog.messages) == 1
    again = Swarm(model, optimizer, inner_steps=2, steps=2)
    again.load_state_dict(swarm.state_dict())
    with again:
        assert again.done
    assert "warning: the run is over at step 2: there is nothing left to train" in caplog.messages


def test_values_that_are_not_finite_at_the_end_are_put_back_alone_too():
    model, optimizer = model_of()
    with Swarm(model, optimizer, inner_steps=5) as swarm:
        for _ in range(7):
            one_step(model, optimizer)
        (loss_of(model) * torch.nan).backward()
        optimizer.step()
    assert torch.isfinite(values(model)).all()
    assert swarm.metrics["steps_lost"] == 3
