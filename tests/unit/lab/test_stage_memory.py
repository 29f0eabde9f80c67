"""The comparison of a stage's memory with the whole model's can fail."""

import pytest

from tests.lab import stage_memory
from tests.support.swarm_runs import Report

MIB = 2**20


@pytest.mark.parametrize(
    ("second", "in_flight", "code"),
    [(52 * MIB, MIB, 0), (54 * MIB, MIB, 1), (50 * MIB, 65 * MIB, 1)],
    ids=["as much as its parameters", "more", "more in flight than allowed"],
)
def test_a_stage_may_grow_by_its_share_of_the_parameters(
    second: int,
    in_flight: int,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(*args: str, depth: int) -> list[Report]:
        deeper = int(depth == max(stage_memory.DEPTHS))
        grown = [100 * MIB] if "--workers" in args else [50 * MIB, second]
        return [
            {
                "stage": number,
                "params": deeper * 1000 // len(grown),
                "peak_rss_bytes": 80 * MIB + deeper * growth,
                "in_flight_peak_bytes": in_flight,
                "in_flight_limit_bytes": 64 * MIB,
            }
            for number, growth in enumerate(grown)
        ]

    monkeypatch.setattr(stage_memory, "run", run)
    monkeypatch.setattr("sys.argv", ["stage_memory.py", "--stages", "2"])
    assert stage_memory.main() == code
    printed = capsys.readouterr().out
    assert "| stage 0 | 136 MB | 52 MB | 0.50 | 0.50 |" in printed
    assert ("wanted" in printed, printed.endswith(": no\n")) == (True, bool(code))
