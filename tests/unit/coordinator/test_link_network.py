"""`--link` from the command line to the workers' commands and the report."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from murmuration.algorithms.link import Link
from murmuration.coordinator.cli import swarm
from murmuration.coordinator.launch import Launch
from murmuration.protos.exit_codes import ExitCode


def test_each_worker_has_its_own_link_or_the_common_one() -> None:
    texts = ("w0=5mbit", "w2=100mbit,delay=20ms", "20mbit")
    links = Launch(workers=4, links=texts).link_of()
    assert list(links) == ["w0", "w1", "w2", "w3"]
    assert links["w0"] == Link(rate_mbps=5)
    assert links["w1"] == links["w3"] == Link(rate_mbps=20)
    assert links["w2"] == Link(rate_mbps=100, delay_s=0.02)
    some = Launch(workers=2, links=("w1=5mbit",)).link_of()
    assert some == {"w0": None, "w1": Link(rate_mbps=5)}


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (("fast",), "'fast' is no number with one of kbit, mbit, gbit"),
        (("20mbit", "5mbit"), "a second one for all; name a worker, as w0=5mbit"),
        (("w0=5mbit", "w0=6mbit"), "a second one for w0"),
        (("w2=5mbit",), "there is no w2; workers are w0 to w1"),
        (("w0=",), "'' is no number"),
        (("20mbit,loss=nan",), "loss is broken connections a minute"),
        (("w0=20mbit,loss=inf",), "loss is broken connections a minute"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(
    texts: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    arguments = ["--workers", "2", "--out", str(tmp_path / "out")]
    for text in texts:
        arguments += ["--link", text]
    result = CliRunner().invoke(swarm, arguments)
    assert result.exit_code == ExitCode.CONFIGURATION
    assert said in result.output
    assert result.output.count("\n") == 1
    assert not (tmp_path / "out").exists()
