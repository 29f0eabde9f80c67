"""Throughput of the codecs: what is asked of them."""

import pytest

from tests.lab.codecs import Speed


@pytest.mark.parametrize(
    ("speed", "enough"),
    [
        (Speed(0.8, None, 0.5), True),
        (Speed(0.8, 0.8, 0.5), True),
        (Speed(0.79, None, 3.0), False),
        (Speed(3.0, 0.79, 3.0), False),
        (Speed(3.0, 3.0, 0.49), False),
    ],
)
def test_a_codec_is_slow_by_its_slowest_figure(speed: Speed, enough: bool) -> None:
    assert speed.is_enough is enough
