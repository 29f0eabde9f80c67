"""From the model's shapes to the mean: every element is averaged exactly once, and rightly."""

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings, strategies as st

from murmuration.algorithms.codecs import CODECS, codec_by_name
from murmuration.algorithms.diloco import mean_in_order
from murmuration.algorithms.draws import reducer_orders
from murmuration.algorithms.fragments import Fragment, TensorSpec, layer_of, partition
from murmuration.algorithms.plan import Plan
from murmuration.worker import wire
from murmuration.worker.wire import tensors

NAMES = tuple(codec.name for codec in CODECS)
CODEC = st.sampled_from(NAMES)
PLANS = st.builds(Plan, codec=CODEC, reduction_codec=CODEC, merge=st.just("keep"))  # for few bits
BLOCKS = st.sampled_from([4096, 8192, tensors.BLOCK_ELEMENTS])
PATTERNS = st.sampled_from(["strided", "sequential"])
GROUPS = st.lists(st.text("abcxyz", min_size=1, max_size=3), min_size=1, max_size=7, unique=True)
SIDES = st.one_of(st.integers(0, 3), st.integers(60, 70))


@st.composite
def models(draw: st.DrawFn) -> list[TensorSpec]:
    """Layers and what is outside them; of no, few or many values, a scalar too."""
    shape = st.lists(SIDES, max_size=2).map(tuple)
    layers = draw(st.integers(0, 8))
    names = [f"layers.{n}.{part}" for n in range(layers) for part in ("q", "mlp.w")]
    names += ["embed", "norm"][: draw(st.integers(0 if layers else 1, 2))]
    return [TensorSpec(name, draw(shape)) for name in draw(st.permutations(names))]


def fragment_counts(schema: Sequence[TensorSpec]) -> st.SearchStrategy[int]:
    """As many as the model has layers for; 0 leaves it to the layers."""
    return st.integers(0, max(1, len({layer_of(spec.name) for spec in schema} - {None})))


@given(models(), st.data(), PATTERNS, PLANS, GROUPS, st.integers(0, 2**64 - 1))
def test_every_element_has_one_shard_and_every_shard_one_reducer(
    schema, data, pattern, plan, group, run
):
    fragments = partition(schema, data.draw(fragment_counts(schema)), pattern)
    assert Counter(spec for each in fragments for spec in each.specs) == Counter(schema)
    for fragment in fragments:
        # Each parameter marks its own elements, then each shard takes its own.
        own = torch.cat([torch.zeros(0), *(torch.full((s.elements,), 1.0) for s in fragment.specs)])
        taken = torch.zeros(fragment.elements)
        bounds = plan.shard_bounds(fragment.elements, len(group))
        chunks_per_peer = plan.chunks_per_peer(fragment.elements, len(group))
        orders = reducer_orders(run, fragment.index, group, chunks_per_peer)
        assert len(bounds) == len(orders) == chunks_per_peer * len(group)
        for start, stop in bounds:
            taken[start:stop] += 1
        assert torch.equal(taken, own)
        first = Counter(order[0] for order in orders)
        assert first == dict.fromkeys(group, chunks_per_peer)


@given(PLANS, st.integers(0, 20_000) | st.integers(0, 10**9), GROUPS)
def test_shards_are_even_and_begin_where_blocks_of_both_codecs_do(plan, elements, group):
    """However large a fragment is, and however many shards a peer reduces of it."""
    bounds = plan.shard_bounds(elements, len(group))
    orders = reducer_orders(7, 0, group, plan.chunks_per_peer(elements, len(group)))
    codecs = [codec_by_name(name) for name in (plan.codec, plan.reduction_codec)]
    block = max(codec.block_elements for codec in codecs)
    at, reduced = 0, Counter(dict.fromkeys(group, 0))
    for (start, stop), order in zip(bounds, orders, strict=True):
        assert start == at
        assert all(start % codec.block_elements == 0 for codec in codecs) or start == elements
        assert abs(stop - start - elements / len(bounds)) <= block
        at = stop
        reduced[order[0]] += 1
    assert at == elements
    assert len(set(reduced.values())) == 1


@pytest.mark.parametrize("codec", NAMES)
@settings(max_examples=8)
@given(CODEC, st.integers(0, 9_000), st.integers(1, 6), BLOCKS, st.integers(0, 99))
def test_the_mean_of_each_element_is_that_of_the_whole_whatever_the_shards_and_blocks(
    codec, reduction_codec, elements, peers, block, seed
):
    plan = Plan(codec=codec, reduction_codec=reduction_codec, merge="keep")
    up, down = codec_by_name(codec), codec_by_name(reduction_codec)
    generator = torch.Generator().manual_seed(seed)
    contributions = [torch.randn(elements, generator=generator) for _ in range(peers)]
    decoded = [up.decode(up.encode(values), elements) for values in contributions]
    expected = down.decode(down.encode(mean_in_order(decoded)), elements)

    arrived = torch.full((elements,), torch.nan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensors, "BLOCK_ELEMENTS", block)
        for start, stop in plan.shard_bounds(elements, peers):
            payloads = [wire.encode(up, values[start:stop]) for values in contributions]
            for payload in payloads:
                wire.check_values(up, payload, stop - start)
            mean = wire.average(up, payloads, stop - start)
            assert torch.equal(mean, mean_in_order(each[start:stop] for each in decoded))
            arrived[start:stop] = wire.decode(down, wire.encode(down, mean), stop - start)
    assert torch.equal(arrived, expected)


@given(CODEC, st.integers(0, 9_000))
def test_what_an_encoding_has_left_out_makes_it_whole(codec, elements):
    values = torch.randn(elements, generator=torch.Generator().manual_seed(elements))
    own = codec_by_name(codec)
    payload = wire.encode(own, values)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensors, "BLOCK_ELEMENTS", 4096)
        error = wire.encoding_error(own, payload, values)
    assert torch.equal(error, values - own.decode(tensors.bytes_tensor(payload), elements))


@pytest.mark.parametrize("codec", NAMES)
@settings(max_examples=8)
@given(CODEC, st.integers(0, 5_000), st.integers(1, 5), st.integers(1, 9), st.integers(0, 99))
def test_limbs_of_integers_are_the_first_ones_whatever_the_codecs(
    codec, reduction_codec, coded, peers, exact, seed
):
    plan = Plan(codec=codec, reduction_codec=reduction_codec, merge="keep")
    up, down = codec_by_name(codec), codec_by_name(reduction_codec)
    generator = torch.Generator().manual_seed(seed)
    floats = [torch.randn(coded, generator=generator) for _ in range(peers)]
    limbs = [torch.randint(-65535, 65536, (exact,), generator=generator) for _ in range(peers)]
    whole, elements = [torch.cat(pair) for pair in zip(floats, limbs, strict=True)], coded + exact
    bounds, without = plan.shard_bounds(elements, peers, exact), plan.shard_bounds(coded, peers)
    assert (bounds[:-1], bounds[-1][0]) == (without[:-1], without[-1][0])
    arrived = torch.full((elements,), torch.nan)
    for start, stop in bounds:
        here = exact if stop == elements else 0
        payloads = [wire.encode(up, values[start:stop], exact=here) for values in whole]
        assert {len(p) for p in payloads} == {wire.encoded_bytes(up, stop - start, here)}
        for payload, values in zip(payloads, whole, strict=True):
            found = wire.check_values(up, payload, stop - start, exact=here)
            plain = wire.encode(up, values[start : stop - here])
            assert found == wire.check_values(up, plain, stop - start - here)
        mean = wire.average(up, payloads, stop - start, exact=here)
        raw = wire.encode(down, mean, exact=here)
        error = wire.encoding_error(down, raw, mean, exact=here)
        arrived[start:stop] = wire.decode(down, raw, stop - start, exact=here)
        assert torch.equal(error, mean - arrived[start:stop])
    assert torch.equal(arrived[coded:], limbs[0].float())


def test_limbs_that_are_not_finite_are_refused():
    e3m0, values = codec_by_name("e3m0"), torch.tensor([1.0, 2.0, torch.nan])
    coded = torch.cat((e3m0.encode(values[:2]), values[2:].view(torch.uint8)))
    for read in (wire.check_values, wire.decode):
        with pytest.raises(wire.WireError, match="NaN"):
            read(e3m0, tensors.tensor_bytes(coded), 3, exact=1)


def test_a_fragment_without_elements_is_covered_by_empty_shards():
    fragment = Fragment(0, (TensorSpec("none", (0, 3)),))
    assert Plan(codec="e3m0").shard_bounds(fragment.elements, 3) == ((0, 0),) * 3
    assert wire.average(codec_by_name("e3m0"), [memoryview(b"")] * 2, 0).shape == (0,)
