"""What makes two manifests the same, and how the first difference is named."""

import pytest
import zstandard

from murmuration.protos.documents import BadDocument, pack
from murmuration.protos.manifest import first_difference, manifest_difference, run_name

RUN = {"diloco": {"inner_steps": 50, "preset": "diloco"}, "tensors": {"a.weight": [4, 8]}}


def test_equal_documents_have_none() -> None:
    assert first_difference(RUN, {**RUN}) is None
    assert first_difference([], []) is None


@pytest.mark.parametrize(
    ("other", "line"),
    [
        (
            {**RUN, "diloco": {"inner_steps": 25, "preset": "ddp"}},
            "diloco.inner_steps: 50 here, 25 there",
        ),
        ({**RUN, "tensors": {"a.weight": [4, 9]}}, "tensors.a.weight[1]: 8 here, 9 there"),
        (
            {**RUN, "tensors": {"a.weight": [4]}},
            "tensors.a.weight: a list of 2 here, a list of 1 there",
        ),
        ({**RUN, "extra": {"x": 1}}, "extra: missing here, a table of 1 there"),
        ({"diloco": RUN["diloco"]}, "tensors: a table of 1 here, missing there"),
        ({**RUN, "diloco": None}, "diloco: a table of 2 here, None there"),
    ],
)
def test_names_the_first_key_and_both_values(other: object, line: str) -> None:
    assert first_difference(RUN, other) == line


def test_a_number_of_another_type_differs() -> None:
    assert first_difference({"x": 1}, {"x": 1.0}) == "x: 1 here, 1.0 there"
    assert first_difference({"x": 1}, {"x": True}) == "x: 1 here, True there"


def test_values_are_shown_shortened() -> None:
    found = first_difference({"x": "a" * 1000}, {"x": "b"})
    assert found is not None
    assert found.endswith("... here, 'b' there")
    assert len(found) < 100


def test_the_same_document_in_other_bytes_is_the_same_run() -> None:
    packed = pack(RUN)
    other = zstandard.ZstdCompressor(level=19, write_checksum=True).compress(
        zstandard.ZstdDecompressor().decompress(packed)
    )
    assert packed != other
    assert manifest_difference(packed, other) is None
    assert run_name(packed) == run_name(other)


def test_says_whose_value_is_which() -> None:
    line = manifest_difference(pack({"x": 1}), pack({"x": 2}))
    assert line == "the manifest is not this run's: x: 1 in this run, 2 in yours"


def test_damaged_bytes_are_refused() -> None:
    with pytest.raises(BadDocument, match="damaged"):
        run_name(b"junk")
    line = manifest_difference(pack(RUN), b"junk")
    assert line is not None
    assert line.startswith("the manifest cannot be read: damaged")
