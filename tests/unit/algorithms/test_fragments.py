"""Fragments: every parameter once, every element once."""

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given, strategies as st

from murmuration.algorithms.fragments import (
    Fragment,
    TensorSpec,
    copy_values,
    layer_of,
    limbs_of,
    partition,
    pieces,
)

SHAPES = st.lists(st.integers(1, 4), max_size=3).map(tuple)
PATTERNS = st.sampled_from(["strided", "sequential"])


@st.composite
def schemas(draw: st.DrawFn) -> list[TensorSpec]:
    """A model of some layers, in any order, with gaps in their numbers."""
    layers = draw(st.lists(st.integers(0, 99), min_size=1, max_size=9, unique=True))
    names = [f"model.layers.{n}.{part}" for n in layers for part in ("attention", "mlp.weight")]
    names += draw(st.lists(st.sampled_from(["embed", "norm", "head.weight"]), unique=True))
    return [TensorSpec(name, draw(SHAPES)) for name in draw(st.permutations(names))]


def layers_of(fragment: Fragment) -> set[int]:
    return {layer for spec in fragment.specs if (layer := layer_of(spec.name)) is not None}


@given(schemas(), st.integers(1, 40))
def test_pieces_are_runs_of_whole_tensors_as_long_as_may_be(schema, elements):
    cut = pieces(schema, elements)
    assert [f.index for f in cut] == list(range(len(cut)))
    assert [spec for f in cut for spec in f.specs] == schema
    assert all(f.elements <= elements or len(f.specs) == 1 for f in cut)
    for one, following in itertools.pairwise(cut):
        assert one.elements + following.specs[0].elements > elements


@given(schemas(), st.data(), PATTERNS)
def test_every_parameter_is_in_exactly_one_fragment(schema, data, pattern):
    layers = {layer_of(spec.name) for spec in schema} - {None}
    fragments = partition(schema, data.draw(st.integers(1, len(layers))), pattern)
    assert Counter(spec for f in fragments for spec in f.specs) == Counter(schema)
    assert [f.index for f in fragments] == list(range(len(fragments)))
    assert all(f.specs for f in fragments)
    for fragment in fragments:  # each in the schema's order
        assert sorted(fragment.specs, key=schema.index) == list(fragment.specs)


@given(schemas(), st.data())
def test_strided_layers_go_round_and_the_rest_comes_last(schema, data):
    layers = sorted({layer_of(spec.name) for spec in schema} - {None})
    count = data.draw(st.integers(min(2, len(layers)), len(layers)))
    fragments = partition(schema, count)
    if count == 1:
        assert fragments == (Fragment(0, tuple(schema)),)
        return
    for index, fragment in enumerate(fragments[:count]):
        assert layers_of(fragment) == set(layers[index::count])
    others = [spec for spec in schema if layer_of(spec.name) is None]
    assert [spec for f in fragments[count:] for spec in f.specs] == others


@given(st.integers(2, 40), st.data())
def test_sequential_fragments_are_even_runs_of_layers(layers, data):
    count = data.draw(st.integers(2, layers))
    fragments = partition(
        [TensorSpec(f"layers.{n}.w", (1,)) for n in range(layers)], count, "sequential"
    )
    runs = [sorted(layers_of(f)) for f in fragments]
    assert list(itertools.chain(*runs)) == list(range(layers))
    assert max(map(len, runs)) - min(map(len, runs)) <= 1


def test_the_layer_is_the_first_numeric_component():
    layers = {"model.layers.12.mlp.weight": 12, "blocks.3.experts.5.w": 3, "0": 0, "h.7": 7}
    layers |= {"lm_head.weight": None, "layer3.weight": None}
    assert {name: layer_of(name) for name in layers} == layers


@pytest.mark.parametrize("fragments", [-1, 3])
def test_fragments_that_cannot_be_are_refused(fragments):
    schema = [TensorSpec("layers.0.w", (1,)), TensorSpec("layers.1.w", (1,))]
    with pytest.raises(ValueError, match=f"^{fragments} fragments of 2 layers; use 1 to 2$"):
        partition(schema, fragments, "strided")


@given(st.lists(SHAPES, min_size=1, max_size=6))
def test_flatten_and_views_are_inverse(shapes):
    fragment = Fragment(0, tuple(TensorSpec(f"p{i}", shape) for i, shape in enumerate(shapes)))
    tensors = {spec.name: torch.randn(spec.shape) for spec in fragment.specs}
    flat = fragment.flatten(tensors)
    assert flat.shape == (fragment.elements,)
    assert flat.dtype == torch.float32
    back = fragment.views(flat)
    assert list(back) == list(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(back[name], tensor)
    longer = fragment.elements + 1
    says = rf"fragment 0 has {fragment.elements} elements, got shape \({longer},\)"
    with pytest.raises(ValueError, match=says):
        fragment.views(torch.zeros(longer))


def test_a_fragment_takes_integers_in_their_own_shape_and_gives_them_back():
    count, flags = torch.tensor((1 << 40) + 3), torch.tensor([True, False])
    specs = (
        TensorSpec("w", (2,)),
        TensorSpec("count", (4,), averaged=True, integers=torch.int64),
        TensorSpec("flags", (2, 1), averaged=True, integers=torch.bool),
    )
    fragment = Fragment(0, specs)
    assert (fragment.elements, fragment.exact) == (8, 6)
    flat = fragment.flatten({"w": torch.ones(2), "count": count, "flags": limbs_of(flags)})
    named = fragment.named(flat)
    assert torch.equal(named["count"], count)
    assert torch.equal(named["flags"], flags)
    assert named["w"].data_ptr() == flat.data_ptr()
    copy_values(fragment.views(flat)["count"], torch.tensor(-1))
    assert fragment.named(flat)["count"] == -1
