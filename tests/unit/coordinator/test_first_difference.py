import pytest
import zstandard

from protos.documents import BadDocument, pack, parse
from protos.manifest import first_difference, manifest_difference, run_name

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


def test_depth_and_length_are_bounded() -> None:
    deep: object = 1
    for _ in range(900):
        deep = [deep]
    found = first_difference(deep, [deep])
    assert found is not None
    assert "nested too deep" in found
    found = first_difference({"x": "a" * 1000}, {"x": "b"})
    assert found is not None
    assert len(found) < 200


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


def test_damaged_and_hostile_bytes_are_refused() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(64 * 1024 * 1024))
    assert len(bomb) < 10_000
    for raw, why in (
        (b"junk", "damaged"),
        (bomb, "larger than"),
        (pack([1, 2]), "not a map"),
        (pack({1: 2}), "not msgpack"),
        (pack({"a": 1})[:-2], "not msgpack|damaged"),
    ):
        with pytest.raises(BadDocument, match=why):
            run_name(raw)
    with pytest.raises(BadDocument, match="lists and maps"):
        parse(b"\xdd\x00\x04\x00\x00" + b"\x80" * 0x40000)  # 256 Ki empty maps
    with pytest.raises(BadDocument, match="not msgpack"):
        parse(b"\x91" * 100_000)
