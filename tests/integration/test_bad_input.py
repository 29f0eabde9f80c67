"""Bad input, given to real processes: one line, the documented exit code, nothing lost."""

import re
import shutil

from tests.support.fork_server import WORKER, run
from tests.support.gates import gate
from tests.support.workers import PATIENCE_S, SMALL, free_addresses, running_swarm, settings_of


def refused(*args: str) -> tuple[int, str]:
    """(exit code, the one line on stderr)."""
    done = run([*WORKER, *args], timeout=PATIENCE_S)
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("murmur: ")
    return done.returncode, line


def test_a_peer_that_does_not_answer_is_given_up_when_the_user_says(tmp_path):
    (address,) = free_addresses(1)
    code, line = refused("join", address, "--out", str(tmp_path), "--wait-s", "0.5")
    assert code == 6
    assert re.search(rf"nobody answers: {address}: .* \([1-9]\d* tries in \d+\.\d s\)", line)


def test_a_worker_says_what_is_wrong(tmp_path):
    """A few of the many ways, in processes of their own; the others are cases of unit tests."""
    held = gate(tmp_path, 1)
    with running_swarm(1, tmp_path, *SMALL, *held.settings) as swarm:
        (first := swarm.start("w0")).wait_for(lambda e: e["event"] == "started", "start")
        address, other = swarm.addresses["w0"], settings_of(diloco__inner_steps=33, inner__lr=0.1)
        nowhere, (closed,) = ("--set", 'task.text="/nowhere/at/all"'), free_addresses(1)
        join = ("join", address, *held.settings)
        up = ("up", "--join", address, *SMALL, *held.settings)
        for code, says, command, out in (
            (4, "/nowhere/at/all", ("up", *nowhere), "v"),
            (7, address, ("up", "--listen", address, *SMALL), "x"),
            (5, "diloco.inner_steps: 33 here, 20 there", (*up, *other), "y"),
            # Before anything is made of that: else 4.
            (5, "runs something else: task.text", (*up, *nowhere), "y"),
            (5, "run.seed: 9 here, 0 there", (*join, *SMALL, *settings_of(run__seed=9)), "z"),
            (5, "run.seed: 9 here, 0 there", (*join, "--seed", "9"), "z"),
            (5, "choose another with --name", (*join, "--name", "w0"), "z"),
            (3, "choose another folder with --out", join, "w0"),
            (
                9,
                f"w0 does not reach new at {closed}, which it advertises (calls come from ",
                (*join, "--name", "new", "--advertise", closed, "--no-relay"),
                "new",
            ),
        ):
            ended, line = refused(*command, "--out", str(tmp_path / out))
            assert (ended, says in line) == (code, True), line
        assert "--advertise HOST:PORT" in line
        assert not (tmp_path / "new").exists()
        first.wait_for(lambda e: "diloco.inner_steps: 33 in the joiner's" in str(e), "refusal told")


def test_a_checkpoint_cut_short_is_passed_over(tmp_path):
    settings = [*SMALL, *settings_of(run__steps=40, diloco__inner_steps=10)]
    settings += settings_of(checkpoint__every_s=0.001)
    with running_swarm(1, tmp_path, *settings) as swarm:
        swarm.start_all()
        swarm.wait()
        newest, before = sorted((tmp_path / "w0" / "checkpoints").iterdir(), reverse=True)
        tensors = newest / "tensors.safetensors"
        tensors.write_bytes(tensors.read_bytes()[:-100])
        swarm.start("w0", "--resume")
        results = swarm.wait()
        warning = swarm.workers["w0"].of("warning")[0]["text"]
    assert str(newest) in warning
    assert "cut short" in warning
    assert results["w0"]["step"] == 40
    assert 0 < results["w0"]["steps"] == 40 - int(before.name.removeprefix("step-"))
    shutil.rmtree(tmp_path / "w0" / "checkpoints")
    code, line = refused("up", "--resume", "--out", str(tmp_path / "w0"), *settings)
    assert code == 8
    assert "no usable checkpoint" in line


def test_a_folder_with_a_checkpoint_of_another_run_stays_unless_asked(tmp_path):
    settings = [*SMALL, *settings_of(run__steps=20, diloco__inner_steps=10)]
    with running_swarm(1, tmp_path, *settings) as swarm:
        swarm.start("w0")
        swarm.wait()
        saved = sorted((tmp_path / "w0" / "checkpoints").iterdir())
        out = ("--out", str(tmp_path / "w0"))
        code, line = refused("up", *out, *settings, *settings_of(diloco__inner_steps=5))
        assert code == 8
        assert "is of another run: diloco.inner_steps: 10 in it, 5 asked for" in line
        assert "--fresh" in line
        assert sorted((tmp_path / "w0" / "checkpoints").iterdir()) == saved
        again = swarm.start("w0")  # the run has ended: nothing is trained
        assert swarm.wait()["w0"]["steps"] == 0
        assert again.of("resumed")[0]["step"] == 20
        anew = swarm.start("w0", "--fresh")
        assert swarm.wait()["w0"]["steps"] == 20
        assert anew.of("resumed") == []
        (aside,) = (tmp_path / "w0").glob("checkpoints-*")
        assert [path.name for path in sorted(aside.iterdir())] == [path.name for path in saved]
