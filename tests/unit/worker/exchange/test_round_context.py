"""What travelled, in bits per value."""

import pytest

from murmuration.algorithms.codecs import CODECS, Codec
from murmuration.worker.exchange.round_context import Flow

VALUES = 1 << 20  # whole blocks of any codec


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_encoded_bytes_stand_for_values_however_few_travelled(codec: Codec) -> None:
    flow, size = Flow(), codec.encoded_bytes(VALUES)
    flow.add(size // 2, size // 2, codec)
    flow.add(0, size - size // 2, codec)
    assert flow.values == pytest.approx(VALUES)
    assert (flow.encoded_bytes, flow.payload_bytes) == (size, size // 2)
