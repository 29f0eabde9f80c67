"""The options of `murmur swarm` as command lines of workers, and those that do not fit."""

from pathlib import Path

import pytest

from murmuration.coordinator import Failure
from murmuration.coordinator.launch import Launch


def staged(**changes: object) -> Launch:
    return Launch(**{"workers": 4, "stages": 2, "resume": True, "out": Path("o"), **changes})


def stages_of(launch: Launch) -> list[str]:
    commands = launch.commands(["h:1", "h:2", "h:3", "h:4"]).values()
    return [c[c.index("--stage") + 1] for c in commands if "--stage" in c]


def test_stages_are_shared_out_in_turns_and_checkpoints_keep_theirs() -> None:
    assert stages_of(staged(resume=False)) == ["0", "1", "0", "1"]
    assert stages_of(staged()) == []


@pytest.mark.parametrize("where", ["--set", "file"])
def test_stages_are_counted_by_the_flag(where: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[stages]\ncount = 2\n")
    other = {"config": path} if where == "file" else {"settings": ("stages.count=2",)}
    with pytest.raises(Failure, match="counted by --stages"):
        Launch(workers=2, out=tmp_path, **other).check()
    Launch(workers=2, stages=2, out=tmp_path, config=path).check()
    with pytest.raises(Failure, match="2 stages cannot share them evenly; take 2 or a multiple"):
        Launch(workers=3, stages=2, out=tmp_path, config=path).check()
    Launch(workers=2, out=tmp_path, config=tmp_path / "missing.toml").check()


def test_workers_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert [Launch.fair_threads(n) for n in (0, 1, 3, 8, 64)] == [8, 8, 2, 1, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert Launch.fair_threads(4) is None


def test_command_lines() -> None:
    launch = Launch(
        workers=2,
        out=Path("o"),
        preset="ddp",
        steps=9,
        text='a "b"',
        settings=("x.y=1",),
        config=Path("run.toml"),
        resume=True,
        threads=1,
        program=("murmur",),
    )
    commands = launch.commands(["h:1", "h:2"])
    assert list(commands) == ["w0", "w1"]
    assert commands["w1"] == [
        *("murmur", "up", "run.toml", "--json", "--no-report", "--min-peers", "2", "--resume"),
        *("--threads", "1", "--preset", "ddp"),
        *("--steps", "9", "--text", 'a "b"', "--set", "x.y=1"),
        *("--name", "w1", "--listen", "h:2", "--out", "o/w1", "--join", "h:1"),
    ]


def test_trackers_are_told_by_each_worker() -> None:
    launch = Launch(workers=2, out=Path("o"), track=("tensorboard", "wandb"))
    for command in launch.commands(["h:1", "h:2"]).values():
        joined = " ".join(command)
        assert "--track tensorboard --track wandb" in joined


def test_proxies_become_options() -> None:
    launch = Launch(workers=2, out=Path("o"), program=("murmur",))
    commands = launch.commands(["h:1", "h:2"], {"w1": "h:3"})
    assert commands["w0"][-2:] == ["--join", "h:2"]
    assert commands["w1"][-2:] == ["--proxy", "h:3"]
