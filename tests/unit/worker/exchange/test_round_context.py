"""What travelled, in bits per value."""

import pytest

from murmuration.algorithms.codecs import CODECS, Codec, codec_by_name
from murmuration.worker.exchange.round_context import Counts, Flow
from murmuration.worker.exchange.view import ShardKey

VALUES = 1 << 20  # whole blocks of any codec


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_encoded_bytes_stand_for_values_however_few_travelled(codec: Codec) -> None:
    flow, size = Flow(), codec.encoded_bytes(VALUES)
    flow.add(size // 2, size // 2, codec)
    flow.add(0, size - size // 2, codec)
    assert flow.values == pytest.approx(VALUES)
    assert (flow.encoded_bytes, flow.payload_bytes) == (size, size // 2)


def test_payload_is_contributions_and_reductions() -> None:
    counts, fp32 = Counts(), codec_by_name("fp32")
    counts.contributions_sent.add(1, 10, fp32)
    counts.reductions_sent.add(2, 10, fp32)
    counts.contributions_received.add(4, 10, fp32)
    counts.reductions_received.add(8, 10, fp32)
    assert (counts.payload_sent_bytes, counts.payload_received_bytes) == (3, 12)


def test_refusals_are_counted_by_reason() -> None:
    counts = Counts()
    for reason in ("again", "group", "again"):
        counts.refuse(reason)
    assert counts.refused == {"again": 2, "group": 1}


def test_a_shard_is_named_in_words() -> None:
    assert str(ShardKey(fragment=2, round=5, shard=3)) == "shard 3 of round 5 of fragment 2"
