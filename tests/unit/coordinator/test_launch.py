"""What comes of the answers of the worker's code: nothing, or a refusal in one line."""

import json
import sys
from pathlib import Path

import pytest

from murmuration.coordinator import Failure
from murmuration.coordinator.launch import Launch, ask_worker
from murmuration.coordinator.link_network import Place

REQUEST = {"config": None, "settings": [], "flags": {}, "presets": ["local", "ddp"]}


def saying(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", f"import json, sys\nrequest = json.load(sys.stdin)\n{code}")


def refusal(code: str, **changes: object) -> tuple[int, str]:
    with pytest.raises(Failure) as refused:
        ask_worker({**REQUEST, **changes}, saying(code))
    return refused.value.exit_code, refused.value.message


def test_the_worker_is_asked_and_its_answer_returned() -> None:
    echo = 'print(json.dumps({"stages": len(request["presets"])}))'
    assert ask_worker(REQUEST, saying(echo)) == {"stages": 2}


@pytest.mark.parametrize(
    ("refused", "preset", "presets", "line"),
    [
        ("--set a.b=1: no", None, [None], "--set a.b=1: no"),
        ("--set a.b=1: no", "ddp", ["ddp"], "--set a.b=1: no"),
        ("--set a.b=1: no", "ddp", ["local", "ddp"], "preset ddp: --set a.b=1: no"),
        ("--preset x: no", "x", ["local", "x"], "--preset x: no"),
    ],
)
def test_a_refusal_is_passed_on(
    refused: str, preset: str | None, presets: list[str | None], line: str
) -> None:
    answer = json.dumps({"refused": refused, "exit_code": 3, "preset": preset})
    assert refusal(f"print({answer!r})", presets=presets) == (3, line)


@pytest.mark.parametrize("code", ["raise RuntimeError('a defect')", "1 / 0", "print('hm')"])
def test_a_defect_is_no_answer(code: str) -> None:
    ended, line = refusal(code)
    assert ended == 1
    assert line.startswith("no worker can be started here: ")


def test_a_launch_says_how_its_settings_were_typed() -> None:
    launch = Launch(
        workers=4, out=Path("o"), preset="ddp", steps=9, routing="skip", settings=("x.y=1",)
    )
    request = launch.request()
    assert request["settings"] == ["run.steps=9", 'stages.routing="skip"', "x.y=1"]
    assert request["flags"] == {
        "run.steps=9": "--steps 9",
        'stages.routing="skip"': "--routing skip",
    }
    assert (request["config"], request["presets"]) == (None, ["ddp"])


def staged(**changes: object) -> Launch:
    return Launch(**{"workers": 4, "stages": 2, "resume": True, "out": Path("o"), **changes})


@pytest.mark.parametrize("routing", [None, "full", "stochastic"])
def test_a_skip_that_the_flags_leave_no_room_for_is_refused_with_a_flag(
    routing: str | None,
) -> None:
    with pytest.raises(Failure, match=r"^--skip 0.25: .* --routing skip .* leave --skip out$"):
        staged(resume=False, skip=0.25, routing=routing).check()


@pytest.mark.parametrize(
    "changes",
    [
        {"routing": "skip"},
        {"routing": "random"},
        {"config": Path("run.toml")},
        {"settings": ('stages.routing="skip"',)},
        {"skip": 0.0},
    ],
)
def test_whether_routes_may_skip_is_the_workers_to_say_elsewhere(
    changes: dict[str, object],
) -> None:
    staged(**{"resume": False, "skip": 0.25, **changes}).check()


def test_workers_go_on_with_the_stages_of_their_checkpoints() -> None:
    assert staged().request()["resume"] == ["o/w0", "o/w1", "o/w2", "o/w3"]
    assert staged(resume=False).request()["resume"] == []
    commands = staged().resumed([1, 0, 1, 1]).commands(["h:1", "h:2", "h:3", "h:4"], None)
    stages = [command[command.index("--stage") + 1] for command in commands.values()]
    assert stages == ["1", "0", "1", "1"]


@pytest.mark.parametrize("held", [[0, 0, 0, 0], [0, 1, None, 1], [0, 1, 2, 1], [None] * 4])
def test_checkpoints_that_are_not_of_all_stages_are_refused(held: list[int | None]) -> None:
    with pytest.raises(Failure) as refused:
        staged().resumed(held)
    assert refused.value.exit_code == 8
    assert f"w2 of {'none' if held[2] is None else held[2]}" in refused.value.message
    assert "not of stages 0 to 1" in refused.value.message


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
    commands = launch.commands(["h:1", "h:2"], "h:3")
    assert list(commands) == ["w0", "w1"]
    assert commands["w1"] == [
        *("murmur", "up", "run.toml", "--json", "--no-report", "--min-peers", "2", "--resume"),
        *("--coordinator", "h:3", "--preset", "ddp", "--threads", "1"),
        *("--set", "run.steps=9", "--set", 'task.text="a \\"b\\""', "--set", "x.y=1"),
        *("--name", "w1", "--listen", "h:2", "--out", "o/w1", "--join", "h:1"),
    ]


def test_trackers_are_told_by_each_worker() -> None:
    launch = Launch(workers=2, out=Path("o"), track=("tensorboard", "wandb"))
    for command in launch.commands(["h:1", "h:2"], None).values():
        joined = " ".join(command)
        assert "--track tensorboard --track wandb" in joined


def test_places_become_commands() -> None:
    launch = Launch(workers=2, out=Path("o"), program=("murmur",))
    places = {
        "w0": Place("10.0.0.2:7", ("nsenter", "--net=/run/netns/n0")),
        "w1": Place("10.0.0.3:7", ("nsenter", "--net=/run/netns/n1"), ("--proxy", "h:1")),
    }
    commands = launch.commands([place.address for place in places.values()], None, places)
    assert commands["w0"][:4] == ["nsenter", "--net=/run/netns/n0", "murmur", "up"]
    assert commands["w0"][-2:] == ["--join", "10.0.0.3:7"]
    assert commands["w1"][-2:] == ["--proxy", "h:1"]
