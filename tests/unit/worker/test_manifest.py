"""The manifest: the same for all peers of a run, and another for every other run."""

import copy
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
import zstandard
from hypothesis import given, strategies as st

from murmuration.algorithms.fragments import TensorSpec
from murmuration.protos.documents import first_difference, pack
from murmuration.worker.config import load_config, parse_config
from murmuration.worker.errors import ManifestRefused
from murmuration.worker.manifest import PROTOCOL, Manifest
from murmuration.worker.node.admission import join_config
from murmuration.worker.wire import WireError

SHAPES = {"model.layers.0.w": (3, 4), "embed": (256, 3), "s": ()}
SCHEMA = [TensorSpec(name, shape) for name, shape in SHAPES.items()]
SCALARS = st.none() | st.booleans() | st.integers(0, 99) | st.floats(0, 9) | st.text(max_size=3)
DOCUMENTS = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


def manifest(*settings: str) -> Manifest:
    return Manifest.of(load_config(None, settings), SCHEMA)


def leaves(document: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in document.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key)


def changed_at(document: dict[str, Any], path: tuple[str, ...], value: object) -> dict[str, Any]:
    inner = copied = copy.deepcopy(document)
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return copied


ALL_LEAVES = list(leaves(manifest("task.model=tiny").agreed))


def test_it_holds_the_run_wide_settings_and_every_tensor():
    document = manifest().document
    assert document["protocol"] == PROTOCOL
    assert document["tensors"] == {"model.layers.0.w": [3, 4], "embed": [256, 3], "s": []}
    sections = {"run", "task", "inner", "stages", "diloco"}
    assert set(document) == {"protocol", *sections, "tensors", "advice"}


def test_peers_may_differ_in_what_is_advice():
    here, there = manifest("diloco.overlap_steps=0"), manifest("diloco.overlap_steps=7")
    assert here.run == there.run
    assert first_difference(here.agreed, there.agreed) is None
    assert parse_config(there.sections, "there").plan.overlap_steps == 7
    assert join_config(there.sections, None, [], "there").plan.overlap_steps == 7
    own = join_config(there.sections, None, ["diloco.overlap_steps=3"], "there")
    assert own.plan.overlap_steps == 3
    assert Manifest.of(own, SCHEMA).run == there.run
    often = manifest("run.evaluate_every=50")
    assert often.run == here.run
    assert join_config(often.sections, None, [], "there").run.evaluate_every == 50
    seldom = join_config(often.sections, None, ["run.evaluate_every=0"], "there")
    assert seldom.run.evaluate_every == 0
    roomy = manifest("stages.memory_mib=128.0")
    assert roomy.run == here.run
    assert parse_config(roomy.sections, "there").stages.memory_mib == 128.0


def test_a_codec_of_another_version_is_refused_with_what_to_do():
    sections = manifest().sections
    theirs = {**sections, "diloco": {**sections["diloco"], "codec": "fp2"}}
    with pytest.raises(ManifestRefused, match=r"there exchanges in the codec 'fp2', which this"):
        join_config(theirs, None, [], "there")


def test_the_run_does_not_depend_on_the_order_of_keys():
    document = manifest().plain()
    backwards = dict(reversed(document.items()))
    backwards["diloco"] = dict(reversed(document["diloco"].items()))
    assert Manifest(backwards).run == manifest().run
    assert first_difference(document, backwards) is None


@pytest.mark.parametrize("path", ALL_LEAVES, ids=".".join)
def test_another_value_anywhere_is_another_run_and_is_named(path):
    ours = manifest("task.model=tiny").plain()
    theirs = changed_at(ours, path, "another")
    assert Manifest(theirs).run != Manifest(ours).run
    named = first_difference(ours, theirs)
    assert named is not None
    assert named.startswith(f"{'.'.join(path)}: ")
    assert named.endswith(" here, 'another' there")


@given(st.dictionaries(st.text(max_size=3), DOCUMENTS, max_size=3), st.data())
def test_two_runs_differ_exactly_where_a_difference_is_named(ours, data):
    theirs = copy.deepcopy(ours)
    if ours and data.draw(st.booleans()):
        path = data.draw(st.sampled_from(list(leaves(ours))))
        theirs = changed_at(ours, path, data.draw(SCALARS))
    named = first_difference(ours, theirs)
    assert (named is None) == (Manifest(ours).run == Manifest(theirs).run)


def test_what_is_no_manifest_is_refused_when_it_is_unpacked():
    """A document that `unpack` lets through must have a run to compare."""
    for document in (None, 3, [], {}, {"protocol": "one"}, {"run": {}}):
        with pytest.raises(WireError, match=r"not a manifest$|not a map with text keys$"):
            Manifest.unpack(pack(document))
    deep_maps = b"\x82\xa8protocol\x01\xa1x" + b"\x81\xa1a" * 600 + b"\x01"
    deep_lists = b"\x82\xa8protocol\x01\xa1x" + b"\x91" * 900 + b"\x01"
    for plain in (deep_maps, deep_lists, msgpack.packb({"protocol": 1, b"bytes": 1})):
        with pytest.raises(WireError):
            assert Manifest.unpack(zstandard.ZstdCompressor().compress(plain)).run


def test_peers_with_another_cut_run_something_else():
    cut = ["stages.count=2", "stages.layers=[2, 1]"]
    here, there = manifest(), manifest(*cut)
    assert here.run != there.run
    sections = Manifest.unpack(there.pack()).sections
    assert parse_config(sections, "there").stages.layers == (2, 1)
    assert join_config(sections, None, cut, "there").stages.layers == (2, 1)
    with pytest.raises(ManifestRefused, match=r"stages.layers: \[1, 2\] here, \[2, 1\] there"):
        join_config(sections, None, ["stages.count=2", "stages.layers=[1, 2]"], "there")
