"""The options of `murmur swarm` as command lines of workers, and those that do not fit."""

from pathlib import Path

import pytest

from murmuration.algorithms.link import Link
from murmuration.coordinator.cli import swarm
from murmuration.coordinator.launch import Launch
from murmuration.protos.exit_codes import ExitCode, MurmurError
from tests.support.commands import refused


def staged(**changes: object) -> Launch:
    return Launch(**{"workers": 4, "stages": 2, "resume": True, "out": Path("o"), **changes})


def stages_of(launch: Launch) -> list[str]:
    commands = launch.commands(["h:1", "h:2", "h:3", "h:4"]).values()
    return [c[c.index("--stage") + 1] for c in commands if "--stage" in c]


def test_stages_are_shared_out_in_turns_and_checkpoints_keep_theirs():
    assert stages_of(staged(resume=False)) == ["0", "1", "0", "1"]
    assert stages_of(staged()) == []


@pytest.mark.parametrize("where", ["--set", "file"])
def test_stages_are_counted_by_the_flag(where, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("\ufeff[stages]\ncount = 2\n")
    other = {"config": path} if where == "file" else {"settings": ("stages.count=2",)}
    with pytest.raises(MurmurError, match="counted by --stages"):
        Launch(workers=2, out=tmp_path, **other).check()
    Launch(workers=2, stages=2, out=tmp_path, config=path).check()
    with pytest.raises(MurmurError, match="2 stages cannot share them evenly; take 2 or"):
        Launch(workers=3, stages=2, out=tmp_path, config=path).check()
    Launch(workers=2, out=tmp_path, config=tmp_path / "missing.toml").check()
    path.write_text("stages = 3")
    Launch(workers=2, out=tmp_path, config=path).check()  # its workers say what is wrong


def test_workers_share_the_cores(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert [Launch.fair_threads(n) for n in (0, 1, 3, 8, 64)] == [8, 8, 2, 1, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert Launch.fair_threads(4) is None


def test_command_lines():
    launch = Launch(
        workers=2, out=Path("o"), preset="ddp", steps=9, text='a "b"', settings=("x.y=1",),
        config=Path("run.toml"), resume=True, threads=1, program=("murmur",), track=("x", "y"),
    )  # fmt: skip
    commands = launch.commands(["h:1", "h:2"])
    assert list(commands) == ["w0", "w1"]
    assert commands["w1"] == [
        *("murmur", "up", "run.toml", "--json", "--no-report", "--min-peers", "2", "--resume"),
        *("--threads", "1", "--track", "x", "--track", "y", "--preset", "ddp"),
        *("--steps", "9", "--text", 'a "b"', "--set", "x.y=1"),
        *("--name", "w1", "--listen", "h:2", "--out", "o/w1", "--join", "h:1"),
    ]


def test_each_worker_has_its_own_link_or_the_common_one():
    links = Launch(workers=4, links=("w0=5mbit", "w2=100mbit,delay=20ms", "20mbit")).link_of()
    assert list(links) == ["w0", "w1", "w2", "w3"]
    assert links["w0"] == Link(rate_mbps=5)
    assert links["w1"] == links["w3"] == Link(rate_mbps=20)
    assert links["w2"] == Link(rate_mbps=100, delay_s=0.02)
    assert Launch(workers=2, links=("w1=5mbit",)).link_of() == {"w0": None, "w1": Link(rate_mbps=5)}


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
def test_what_is_wrong_is_said_before_anything_starts(texts, said, tmp_path):
    arguments = ["--workers", "2", "--out", str(tmp_path / "out")]
    for text in texts:
        arguments += ["--link", text]
    assert said in refused(swarm, ExitCode.CONFIGURATION, *arguments)
    assert not (tmp_path / "out").exists()
