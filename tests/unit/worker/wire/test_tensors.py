"""Tensors become bytes without a copy; values that are not finite or absurd are refused."""

from itertools import product

import pytest
import torch
from hypothesis import given, strategies as st

from murmuration.algorithms.codecs import codec_by_name
from murmuration.worker import wire
from murmuration.worker.wire import WireError, hash64
from murmuration.worker.wire.tensors import bytes_tensor, tensor_bytes


@given(st.lists(st.floats(width=32, allow_nan=False), max_size=30))
def test_tensors_become_bytes_and_back_without_a_copy(values):
    tensor = torch.tensor(values, dtype=torch.float32)
    raw = tensor_bytes(tensor)
    assert raw.nbytes == 4 * len(values)
    back = bytes_tensor(raw).view(torch.float32)
    assert torch.equal(back, tensor)
    if values:
        assert back.data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize(
    ("values", "finite"),
    [
        ([], True),
        ([0.0, -1e15, 3.0], True),
        ([1.0, float("nan"), 2.0], False),
        ([1.0, float("inf")], False),
        ([float("-inf"), float("inf")], False),
        ([1e38], False),
        ([1e20, 0.0], False),
    ],
)
def test_only_finite_values_of_sane_size_pass(values, finite):
    assert wire.is_finite(torch.tensor(values, dtype=torch.float32)) is finite


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_a_reduction_that_is_not_finite_or_absurd_is_refused(bad):
    """Whatever the codec: here a reducer that lies in fp32."""
    values = torch.ones(1000)
    values[777] = bad
    with pytest.raises(WireError, match="NaN, Inf or absurdly large"):
        wire.decode(codec_by_name("fp32"), tensor_bytes(values), 1000)


def test_a_state_hash_covers_anchor_momentum_and_group():
    anchor, momentum, group = torch.arange(4.0), torch.ones(4), ("a", "b")
    hashed = wire.state_hash(anchor, momentum, group)
    assert hashed == wire.state_hash(anchor.clone(), momentum.clone(), group)
    assert hashed == hash64(b"".join([tensor_bytes(anchor), tensor_bytes(momentum), b"a\nb"]))
    for index, which in product(range(4), range(2)):
        state = [anchor.clone(), momentum.clone()]
        state[which][index] += 1e-6 + state[which][index] * 1e-6
        assert wire.state_hash(*state, group) != hashed
    assert wire.state_hash(anchor, momentum, ("a", "c")) != hashed
    assert wire.state_hash(anchor, momentum, ()) != hashed


def test_a_tensor_hash_is_128_bits_of_all_tensors_in_order():
    first, second = torch.arange(4.0), torch.ones(3)
    hashed = wire.tensor_hash([first, second])
    assert len(hashed) == 32
    assert hashed == wire.tensor_hash([torch.cat([first, second])])
    assert hashed != wire.tensor_hash([second, first])


def test_a_group_hash_depends_on_names_and_order():
    assert len({wire.group_hash(g) for g in (("a", "b"), ("b", "a"), ("ab",), ())}) == 4


def test_bytes_that_no_encoder_writes_are_a_wire_error():
    topk = codec_by_name("topk")
    payload = memoryview(bytearray(topk.encoded_bytes(4096)))
    for check in (wire.check_values, wire.decode):
        with pytest.raises(WireError, match="the bits do not say 64 places"):
            check(topk, payload, 4096)
