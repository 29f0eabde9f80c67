"""`murmur simulate`: what it prints and writes, and what it refuses."""

import json

import pytest

from murmuration.worker.cli.simulate import simulate
from tests.support import commands

SMALL = ("--peers", "2,4", "--rounds", "3")


def test_a_row_for_each_number_of_peers_and_a_table_for_each_preset():
    output = commands.printed(simulate, *SMALL, "--preset", "noloco", "--preset", "diloco")
    rows = [line.split() for line in output.splitlines() if " peers " in line]
    assert [(row[0], row[2], row[3]) for row in rows] == [
        ("2", "1.7", "s"),
        ("4", "1.7", "s"),
        ("2", "1.7", "s"),
        ("4", "2.5", "s"),
    ]
    assert "noloco" in output
    assert "diloco" in output


def test_the_same_seed_gives_the_same_bytes(tmp_path):
    troubles = ("--straggler", "5x:0.3", "--partition", "5s:9s", "--crash", "0.2")
    freezes = ("--freeze", "0.2:8s", "--latency-spread", "0.5", "--step-spread", "0.1")
    outputs = []
    for name in ("a", "b"):
        files = ("--json", str(tmp_path / f"{name}.json"))
        options = ("--peers", "8", "--rounds", "4", "--link", "20mbit,delay=50ms,loss=1")
        outputs.append(commands.printed(simulate, *options, *troubles, *freezes, *files))
    assert outputs[0] == outputs[1]
    assert "failed, " in outputs[0]
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    (found,) = json.loads((tmp_path / "a.json").read_text())
    assert found["scenario"]["link"] == "20mbit,delay=50ms,loss=1"
    assert (found["scenario"]["slow_factor"], found["scenario"]["partition"]) == (5.0, [5.0, 9.0])
    assert found["figures"]["rounds_failed"] == sum(found["figures"]["reasons"].values())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--peers", "four"), "--peers four: write it like 4,16,64"),
        (("--peers", "1"), "peers is 1; 2 to 10,000 can be simulated"),
        (("--preset", "diloco", "--peers", "16,1000"), "1,000 peers of diloco: all send to all"),
        (("--link", "fast"), "--link: link 'fast'"),
        (("--straggler", "5:0.1"), "--straggler 5:0.1: write it like 5x:0.1"),
        (("--partition", "20s:10s"), "it must end after it began"),
        (("--freeze", "60s"), "--freeze 60s: write it like 0.1:60s"),
        (("--codec", "fp5"), "unknown codec 'fp5'"),
        ((*SMALL, "--json", "missing/folder/file.json"), "No such file or directory"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(args, message):
    assert message in commands.refused(simulate, 2, *args)
