"""`murmur plan`: what it prints, what it refuses, and that its proposals can be typed."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from murmuration.worker.cli.plan_command import plan
from tests.support import commands

BY_HAND = ("--params", "1_000_000", "--layers", "4", "--step-time", "0.1")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("some text to learn from. " * 200)
    return tmp_path


def linked(args: tuple[str, ...], link: str) -> tuple[str, ...]:
    return (*args, *(("--links", link) if link else ()))


def printed(*args: str, link: str = "20mbit") -> str:
    return commands.printed(plan, *linked(args, link))


def document(*args: str, link: str = "20mbit") -> dict[str, Any]:
    return json.loads(printed(*args, "--json", link=link))


def refused(code: int, *args: str, link: str = "20mbit") -> str:
    return commands.refused(plan, code, *linked(args, link))


def test_a_model_given_by_hand_needs_neither_task_nor_clock():
    found = document(*BY_HAND, "--params", "1000002", "--peers", "2", "--set", "task.name=none")
    assert (found["task"], found["layers"], found["parameters"]) == ("this model", 4, 1_000_002)
    assert (found["step_s"], found["step_source"], found["peers"]) == (0.1, "as given", 2)
    (link,) = found["links"]
    told = link["prediction"]
    # H 20, two peers, fp32: 32 Mbit per sync at 20 Mbit/s after 2 s of computing.
    assert told["stall_s_per_period"] == pytest.approx(1.6, rel=1e-5)
    assert told["utilization"] == pytest.approx(2 / 3.6, rel=1e-5)
    assert told["bytes_per_sync"] == 4 * 1_000_002
    # Half of the time for computing: 2 s for as many bits.
    assert link["needed_mbps"]["0.5"] == pytest.approx(16, rel=0.003)


def test_parameters_and_layers_come_from_the_task():
    found = document("--set", "task.text=text.txt", "--step-time", "0.03")
    assert (found["task"], found["layers"]) == ("llama-bytes", 3)
    assert 0 < found["parameters_outside_layers"] < found["parameters"]


def test_the_step_is_timed_where_no_time_is_given(monkeypatch):
    monkeypatch.setattr("murmuration.worker.cli.plan_report.median_s", lambda step: step())
    threads = torch.get_num_threads()
    small = "task.architecture={hidden_size=12, intermediate_size=12}"
    text = printed("--set", "task.text=text.txt", "--set", small)
    assert torch.get_num_threads() == threads
    assert " a step, measured on this machine, one thread\n" in text.splitlines(keepends=True)[0]


@pytest.mark.parametrize(
    ("run", "link"),
    [
        (["run.toml"], "20mbit,delay=50ms"),
        (["--preset", "streaming", "--set", "diloco.overlap=measured"], "20mbit"),
    ],
)
def test_typing_a_proposal_gives_what_it_promises(run, link):
    """Another period brings another overlap."""
    Path("run.toml").write_text('[diloco]\npreset = "streaming"\ninner_steps = 33\n')
    (answer,) = document(*run, *BY_HAND, link=link)["links"]
    assert answer["proposals"]
    for proposal in answer["proposals"]:
        (again,) = document(*run, *BY_HAND, *proposal["arguments"], link=link)["links"]
        assert again["prediction"] == proposal["prediction"]
        assert again["prediction"]["utilization"] >= 0.95


def test_proposals_keep_what_the_user_has_set():
    answer = document(*BY_HAND, "--set", "diloco.outer_lr=0.25")["links"][0]
    assert {proposal["plan"]["outer_lr"] for proposal in answer["proposals"]} == {0.25}


def test_the_table_is_readable_in_a_pipe():
    text = printed(*BY_HAND)
    lines = text.splitlines()
    assert lines[0] == "this model: 4 layers, 1,000,000 parameters; 100 ms a step, as given"
    assert lines[2] == "4 peers, each on 20mbit"
    assert lines[3] == "  this run      diloco: H 20, 1 fragment, tau 0, fp32"
    assert lines[4].startswith("  utilization   45.5 %; 2.4 s waiting in a period of 4.4 s")
    assert "bf16 DDP      would send 10.0 times as much" in text
    assert "speed needed  50 %: 24 Mbit/s" in text
    assert "for 95 %" in text
    typed = [line for line in lines if line.startswith("  1  ")]
    assert {"--set", "--preset"} & set(shlex.split(typed[-1]))
    assert "\x1b" not in text


@pytest.mark.parametrize(
    ("model", "name", "ddp"),
    [
        (["--set", "task.text=text.txt"], "llama-bytes", 381_600),
        (["--params", "1000000000", "--layers", "24"], "this model", 1_000_000_000),
    ],
)
def test_of_kseed_the_vector_travels_beside_ddp_of_the_model(model, name, ddp):
    run = (*model, "--step-time", "0.1", "--preset", "kseed")
    found = document(*run)
    assert (found["task"], found["parameters"], found["ddp_parameters"]) == (name, 4096, ddp)
    told = found["links"][0]["prediction"]
    assert told["bytes_per_sync"] == 2 * 3 / 4 * 4 * 4096
    assert told["ddp_ratio"] == pytest.approx(20 * 2 * ddp / (4 * 4096))
    assert printed(*run).startswith(
        f"{name}: 4,096 coefficients for {ddp:,} parameters; 100 ms a step"
    )


def test_a_target_out_of_reach_names_the_link_that_it_takes():
    text = printed(*BY_HAND, link="1kbit")
    assert "no H up to 500 reaches 95 % on this link; it takes " in text
    assert "bit/s, or a lower --target" in text
    text = printed(*BY_HAND, link="1gbit,delay=99s")
    assert "no H up to 500 reaches 95 % on this link, nor on any with its delay" in text
    assert "99 %: none is enough" in text


BY_HAND_5 = f"{' '.join(BY_HAND)} --set diloco.fragments=5"


@pytest.mark.parametrize(
    ("code", "typed", "words"),
    [
        (2, "--links 20", "--link: link '20': '20' is no number with one of kbit, mbit, gbit; "),
        (2, "--links 0mbit", "--link: a link of 0 Mbit/s; it must be above 0"),
        (2, "--step-time nan", "--step-time is nan; it must be a finite number"),
        (2, "--layers 9", "--layers needs --params"),
        (2, "--params 9 --layers 2", "cannot be timed here; add --step-time"),
        (2, "--params 2 --layers 9 --step-time 1", "--layers 9 is more than --params 2"),
        (3, BY_HAND_5, "--set diloco.fragments=5: [diloco] 5 fragments of 4 layers; use 1 to 4"),
        (2, "--set stages.count=2", "a model in stages is not predicted"),
        (4, "--set task.text=missing.txt", "text 'missing.txt': no such file"),
    ],
)
def test_bad_input_is_one_line_and_a_documented_exit_code(code, typed, words):
    assert words in refused(code, *typed.split())
