"""The words of `Swarm` on arguments that cannot be used: one line, in the caller's terms."""

import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR

from murmuration import Muon, MurmurError, Swarm
from murmuration.worker.library.arguments import in_arguments
from tests.unit.worker.library.test_swarm import model_of

NAN = float("nan")


def refusal(make: Callable[[], object]) -> str:
    """The error and its line."""
    with pytest.raises(MurmurError) as refused:
        make()
    assert "\n" not in str(refused.value)
    assert "--" not in str(refused.value)
    return f"{type(refused.value).__name__}: {refused.value}"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"join": ""}, "join=''"),
        ({"join": 5}, "join=5: write HOST:PORT as a text"),
        ({"join": ["a:1", None]}, "join=None: write HOST:PORT"),
        ({"join": "host"}, "'host' is no HOST:PORT"),
        ({"steps": 0}, "steps=0: it must be of type int, at least 1"),
        ({"steps": "10"}, "steps='10': it must be of type int"),
        ({"steps": 10**30}, "it must be less than 2^63"),
        ({"inner_steps": 0}, "inner_steps=0"),
        ({"min_peers": 0}, "min_peers=0"),
        ({"wait_s": -1}, "wait_s=-1: it must be a number of seconds, above 0"),
        ({"wait_s": NAN}, "wait_s=nan: it must be a number"),
        ({"out": 5}, "out=5: it must be the path of a folder"),
        ({"out": __file__}, "is a file: name a folder"),
        ({"out": f"{__file__}/below"}, "is a file: name a folder"),
        ({"name": ""}, "name='': it must be a text that is not empty"),
        ({"name": "x" * 300}, "no name or address of a peer"),
        ({"name": "\udc80"}, "it is not UTF-8, which peers tell names in; rename it"),
        ({"out": Path("\udc80")}, "it is not UTF-8"),
        ({"preset": 5}, "preset=5"),
        ({"preset": "streaming", "settings": {"diloco.preset": "noloco"}}, "leave one of them out"),
        ({"inner_steps": 5, "settings": {"diloco.inner_steps": 7}}, "inner_steps=5 and settings["),
        ({"preset": "ddp", "inner_steps": 7}, "inner_steps=7 and preset='ddp'"),
        ({"settings": {"diloco.preset": "ddp"}, "inner_steps": 7}, "inner_steps=7 and preset"),
        ({"settings": ["diloco.codec"]}, "settings=['diloco.codec']: write a dict"),
        ({"settings": {"diloco": {"codec": "e3m0"}}}, "settings['diloco']: write section.key"),
        ({"settings": {"diloco.codec": None}}, "settings['diloco.codec'] is None"),
        ({"settings": {"inner.lr": 0.1}}, "the optimizer of your loop is your own"),
        ({"settings": {"task.data": "leased"}}, "is for tasks: a loop of your own brings"),
        ({"settings": {"stages.count": 2}}, "trains whole models"),
        ({"settings": {"checkpoint.every_s": 9}}, "is for tasks"),
        ({"listen": 7700}, "listen=7700: write HOST:PORT as a text"),
        ({"listen": "nowhere"}, "listen='nowhere'"),
        ({"advertise": ""}, "advertise=''"),
        ({"token": 5}, "token=5"),
        ({"insecure": "no"}, "insecure='no': it must be True or False"),
        ({"no_relay": 1}, "no_relay=1"),
        ({"relay_mbps": -1}, "relay_mbps=-1: it must be a rate of at least 0"),
        ({"web": True}, "web=True: write a port"),
        ({"serve_metrics": 1.5}, "serve_metrics=1.5: write a port"),
        ({"listen": "192.0.2.1:0", "insecure": True}, "with listen='HOST:PORT'"),
        ({"listen": "0.0.0.0:0"}, "(or say insecure=True: nothing is encrypted"),
    ],
    ids=str,
)
def test_an_argument_that_cannot_be_used_is_named_as_it_was_written(given, says):
    assert says in refusal(lambda: Swarm(*model_of(), **given).__enter__())


def test_numbers_of_numpy_and_torch_and_what_is_left_out_are_taken():
    for given in [
        {"join": None},
        {"join": []},
        {"steps": np.int64(5), "inner_steps": np.int32(5)},
        {"steps": torch.tensor(5), "min_peers": np.uint8(1)},
        {"wait_s": np.float32(5), "relay_mbps": np.int64(0), "no_relay": np.True_},
        {"settings": {"diloco.outer_lr": np.float32(0.5), "run.seed": np.int64(3)}},
        {"preset": "streaming", "settings": {"diloco.preset": "streaming"}},
        {"preset": "ddp", "inner_steps": 1},
        {"serve_metrics": np.int64(0)},
    ]:
        Swarm(*model_of(), **given)


LINEAR = nn.Linear(2, 2)
OPTIMIZER = SGD(LINEAR.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("model", "optimizer", "says"),
    [
        (LINEAR, "adam", "optimizer is 'adam', no torch.optim.Optimizer; make one"),
        (LINEAR, SGD, "optimizer is the class SGD"),
        (LINEAR, StepLR(OPTIMIZER, 1), "StepLR, no torch.optim.Optimizer; give its .optimizer"),
        (LINEAR, torch.amp.GradScaler("cpu"), "the scaler stays in your loop"),
        (LINEAR, SGD.__new__(SGD), "SGD, no torch.optim.Optimizer; call super().__init__("),
        (LINEAR, {"sgd": OPTIMIZER}, "give its optimizers as a list"),
        (LINEAR, [OPTIMIZER, "adam"], "optimizer is 'adam'"),
        (LINEAR, [OPTIMIZER, OPTIMIZER], "one is given twice"),
        (LINEAR, LINEAR.parameters(), "optimizer is of type Parameter"),
        (LINEAR, [], "no optimizer was given"),
        (LINEAR, SGD([{"params": []}], lr=0.1), "the optimizer has no parameters"),
        (LINEAR, Adam(nn.Linear(2, 2).parameters()), "2 parameters that are not model Linear's"),
        (nn.Identity(), OPTIMIZER, "model Identity has no parameters"),
        (nn.Linear(2, 2).requires_grad_(False), OPTIMIZER, "every parameter is frozen"),
        (OPTIMIZER, LINEAR, "the model comes first"),
        ([LINEAR], OPTIMIZER, "model is of type list; give a torch.nn.Module"),
        (nn.Linear, OPTIMIZER, "model is the class Linear"),
        (LINEAR.state_dict(), OPTIMIZER, "model is of type OrderedDict"),
    ],
)
def test_what_is_no_model_or_no_optimizer_is_one_line(model, optimizer, says):
    assert says in refusal(lambda: Swarm(model, optimizer))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (partial(torch.ones, 3, device="meta"), "is on the device meta, without values"),
        (lambda: torch.eye(3).to_sparse(), "has the layout sparse_coo: make it dense"),
        (lambda: nn.Parameter(torch.ones(3, device="meta"), requires_grad=False), "device meta"),
        (partial(torch.quantize_per_tensor, torch.ones(3), 0.1, 0, torch.qint8), "is quantized"),
        (torch.inference_mode()(partial(torch.ones, 3)), "was made in torch.inference_mode"),
        (nn.UninitializedBuffer, "is of a lazy module and has no shape yet"),
        (nn.UninitializedParameter, "run a batch through the model first"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # torch says that some of these are unfinished or old
def test_a_tensor_without_plain_values_is_one_line(make, says):
    model, optimizer = model_of()
    made = make()
    if isinstance(made, nn.Parameter):
        model.extra = made
    else:
        model.register_buffer("extra", made)
    line = refusal(partial(Swarm, model, optimizer))
    assert "'extra'" in line
    assert says in line


def test_a_sparse_buffer_that_is_not_saved_stays_at_home():
    model, optimizer = model_of()
    model.register_buffer("graph", torch.eye(3).to_sparse(), persistent=False)
    Swarm(model, optimizer)


def muon(*shapes: tuple[int, ...], **more: Any) -> Muon:
    made = [nn.Parameter(torch.ones(shape, **more)) for shape in shapes]
    return Muon(made, lr=0.1, momentum=0.0, weight_decay=0.0)


def test_muon_is_for_matrices():
    for make, says in [
        (lambda: muon((3,)), "Muon is for matrices: a parameter of shape (3,) is 1-D"),
        (lambda: muon((3, 3), ()), "is 0-D"),
        (lambda: muon((3, 3), dtype=torch.cfloat), "is complex"),
        (lambda: muon((2, 2)).add_param_group({"params": [nn.Parameter(torch.ones(3))]}), "1-D"),
    ]:
        assert says in refusal(make)


def test_muon_takes_the_filters_of_a_convolution_for_a_matrix():
    values = torch.randn(3, 2, 2, 2, generator=torch.Generator().manual_seed(0))
    whole, flat = nn.Parameter(values.clone()), nn.Parameter(values.flatten(1).clone())
    for each, gradient in ((whole, values), (flat, values.flatten(1))):
        each.grad = gradient.clone()
        Muon([each], lr=0.1, momentum=0.0, weight_decay=0.1).step()
    assert torch.equal(whole.flatten(1), flat)


def test_options_are_arguments_of_python():
    for line, as_arguments in [
        ("lower --min-peers, or wait with --wait-s", "min_peers=, or wait with wait_s="),
        ("with --listen HOST:PORT (port 0", "with listen='HOST:PORT' (port 0"),
        ("say --listen 0.0.0.0:7700, or", "say listen='0.0.0.0:7700', or"),
        ("--out /a/b: no room", "out='/a/b': no room"),
        ("--metrics 127.0.0.1:1", "serve_metrics='127.0.0.1:1'"),
        ("`murmur token create OUT`, as --token", "`murmur token create OUT`, as token="),
        ("--set diloco.codec", "settings= diloco.codec"),
        ("begin another by `murmur up`", "begin another without join="),
    ]:
        assert as_arguments in in_arguments(line)


def test_a_peer_that_waited_in_vain_reads_its_own_arguments():
    said = refusal(lambda: Swarm(*model_of(), min_peers=2, wait_s=0.2).__enter__())
    assert "tried: nobody, as no join= names any; start the others, lower min_peers=, or " in said


@pytest.mark.parametrize("given", [{"min_peers": 2}, {"join": "127.0.0.1:9"}])
def test_an_error_of_the_user_ends_in_the_users_frames(given):
    with pytest.raises(MurmurError) as caught:
        Swarm(*model_of(), **given, wait_s=0.1).__enter__()
    error = caught.value
    assert [each.name for each in traceback.extract_tb(error.__traceback__)][1:] == ["call"]
    assert error.__cause__ is None
    assert error.__suppress_context__


def test_a_loss_is_one_number():
    swarm = Swarm(*model_of())
    for loss in ("x", None, [1.0], torch.ones(2), {"loss": 1.0}):
        assert "swarm.report takes one number" in refusal(partial(swarm.report, loss))
