"""Bad input: one line on stderr and a documented exit code. What shells complete."""

import errno
import io
import itertools
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from murmuration.algorithms.plan import PRESETS
from murmuration.protos.files import print_line
from murmuration.worker import cli
from murmuration.worker.cli import options
from murmuration.worker.cli.commands import addresses_and_run
from murmuration.worker.errors import ConfigError
from murmuration.worker.tasks import Batch, Cursor
from murmuration.worker.tasks.llama_bytes import LlamaBytes

Murmur = Callable[..., tuple[int, str, str]]


@pytest.fixture
def murmur(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Murmur:
    """Runs `murmur`, in this process and a folder with a text: (code, out, err)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    (tmp_path / "text.txt").write_text("some text to learn from. " * 200)

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["murmur", *args])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, captured.out, captured.err

    return run


def refused(murmur: Murmur, code: int, typed: str) -> str:
    """The one line that refuses these arguments with this exit code."""
    ended, out, err = murmur(*shlex.split(typed))
    assert (ended, out) == (code, ""), err
    assert err.count("\n") == 1, err
    assert err.endswith("\n")
    return err.removesuffix("\n")


TOKEN_NEEDED = (
    "other machines can reach this peer, so it needs a token: make one where the run was begun, "
    "with `murmur token create RUN`, which is its --out, and give it as --token (or say "
    "--insecure: nothing is encrypted then, and anybody may join)"
)
NO_ADDRESS = "is no HOST:PORT, such as 192.0.2.7:7700"
SERVED = "machine, up to 65535, such as 9464, or HOST:PORT where others are to read it"
HELP = " --help`"


@pytest.mark.parametrize(
    ("code", "typed", "begins", "ends"),
    [
        # Configurations.
        (3, "up --set diloco.inner_step=5", "--set diloco.inner_step=5: [diloco] has no key "
         "'inner_step'; did you mean 'inner_steps'?", ""),
        (3, "up --steps 0", "--steps 0: [run] steps is 0; it must be at least 1", ""),
        (3, "up --inner-steps 0", "--inner-steps 0: [diloco] inner_steps (H) is 0", ""),
        (3, "up missing.toml", "missing.toml: cannot be read: No such file or directory", ""),
        (3, "up --join 127.0.0.1:1 --listen 0.0.0.0:7700", TOKEN_NEEDED, ""),
        (3, "up --set task.text=text.txt --set diloco.fragments=99",
         "--set diloco.fragments=99: [diloco] 99 fragments of 3 layers", ""),
        (3, "up --stage 1 --set stages.count=2 --set stages.layers=[2,1] --set task.text=text.txt "
         "--set diloco.fragments=2", "--set diloco.fragments=2: stage 1: [diloco] 2 fragments of 1 "
         "layers; use 1 to 1", ""),
        (3, "up --stage 0 --set stages.count=2 --set stages.layers=[3,1] --set task.text=text.txt",
         "--set stages.layers=[3,1]: [stages] count = 2: layers is [3, 1], 4 in all, but the model "
         "has 3; write 2 numbers that add up to 3, or leave layers out", ""),
        (3, "up --set stages.count=3 --set stages.layers=[2,1]", "--set stages.layers=[2,1]: "
         "[stages] layers is [2, 1], of 2 stages, but count is 3; ", ""),
        (3, "up --out loop --steps 1", "--out loop: File exists; ",
         "choose another folder with --out"),
        # Tasks and texts.
        (4, "up --text missing.txt --model tiny --seed 3",
         "--text missing.txt: text 'missing.txt': no such file or folder", ""),
        (4, "up --set task.name=lama-bytes", "--set task.name=lama-bytes: unknown task "
         "'lama-bytes'; did you mean 'llama-bytes'?", ""),
        (4, "up --set task.nmae=x", "--set task.nmae=x: task 'llama-bytes' has no option 'nmae'; ",
         "did you mean 'name'?"),
        (4, "up --model tny", "--model tny: unknown model 'tny'; did you mean 'tiny'?", ""),
        (8, "generate nowhere 'def '", "nowhere: no usable checkpoint; ",
         "name a folder that `murmur` wrote to"),
        # Usage.
        (2, "swram", "no such command 'swram' (did you mean swarm?); see `murmur --help`", ""),
        (2, "up --presett diloco", "no such option '--presett'", HELP),
        (2, "up --min-peers 0", "invalid value", HELP),
        (2, "up --threads none", "invalid value", HELP),
        (2, "join", "missing argument 'HOST:PORT... [RUN]', of murmur join [OPTIONS] HOST", HELP),
        (2, "generate run", "missing argument 'PROMPT', of murmur generate [OPTIONS] RUN", HELP),
        (2, "token create --uses", "option '--uses' requires", " see `murmur token create --help`"),
        (2, "up --resume --fresh", "--resume and --fresh: one or the other", ""),
        (2, "up --set stages.count=2", "this run has 2 stages: say which one this worker serves "
         "with --stage 0 to 1, or ", ""),
        (2, "up --stage 9", "--stage 9: the model of this run is not cut into stages", ""),
        (2, "join a.toml 127.0.0.1:1 b.toml", "a.toml and b.toml: name one TOML file", ""),
        (2, "join 127.0.0.1:1 a.toml --config b.toml",
         "a.toml and --config b.toml: name one TOML file", ""),
        (2, "join a.toml", "a.toml: say whom to join too, as HOST:PORT", ""),
        (2, "doctor 127.0.0.1:1 127.0.0.1:2", "127.0.0.1:1 127.0.0.1:2: the doctor asks one peer; ",
         "name one HOST:PORT"),
        # Addresses.
        *((2, f"{before} {address}", "", f"'{address}' {NO_ADDRESS}")
          for before in ("join", "up --join", "up --coordinator", "up --listen")
          for address in ("nowhere", "host:", ":7700", "host:port")),
        (2, "join host:65536", "", f"{NO_ADDRESS}; ports end at 65535"),
        (2, "join host:\N{SUPERSCRIPT TWO}", "", NO_ADDRESS),
        *((2, f"up {flag} {address}", f"{flag} {address}: ", SERVED)
          for flag in ("--metrics", "--web")
          for address in ("metrics", "host:", "70000", ":9464")),
        (2, "up --advertise 0.0.0.0:7700", "--advertise 0.0.0.0:7700: nobody can dial that", ""),
        # Names that peers could not be told.
        *((2, f"{before}caf\udce9{after}", "caf?",
           "it is not UTF-8, which peers tell names in; rename it")
          for before, after in (("up --text ", ""), ("up --out ", ""), ("join ", ":7700"),
                                ("up ", ".toml"), ("doctor --name ", ""), ("report ", ""))),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isascii() else "",
)  # fmt: skip
def test_bad_input_is_one_line_with_its_exit_code_and_leaves_nothing_behind(
    murmur, code, typed, begins, ends
):
    Path("loop").symlink_to("loop")
    line = refused(murmur, code, typed)
    assert line.startswith(f"murmur: {begins}")
    assert line.endswith(ends)
    assert {path.name for path in Path().iterdir()} == {"loop", "text.txt"}


def test_what_help_and_version_tell(murmur):
    """The doctor takes all that `murmur join` takes, and lists none of what means nothing there."""
    commands = ("coordinator", "doctor", "generate", "join", "status", "swarm", "up")
    out = murmur("--help")[1]
    assert "Exit codes: 0 done; 1 failed; 2 usage; 3 configuration; 4 task or text" in out
    assert all(f"\n  {command} " in out for command in commands)

    shown = {name: {*re.findall(r"--[a-z-]+", murmur(name, "--help")[1])} for name in commands}
    shared = {"--preset", "--steps", "--inner-steps", "--seed", "--text", "--model", "--out"}
    assert shared <= shown["up"] & shown["join"]  # the words of a swarm
    assert {"--fresh", "--track", "--threads"} <= shown["join"] - shown["doctor"]
    code, out, _ = murmur("--version")
    assert code == 0
    assert out.startswith("murmur, version ")


def test_generated_text_is_printed_while_it_is_made(murmur, monkeypatch, capsys):
    printed = []

    def pieces(*_: object) -> Iterator[str]:
        for piece in ("one ", "é", "\n"):
            printed.append(capsys.readouterr().out)
            yield piece

    monkeypatch.setattr("murmuration.worker.training.evaluation.generate_text", pieces)
    code, rest, _ = murmur("generate", "run", "a prompt ")
    assert (code, printed, rest) == (0, ["a prompt ", "one ", "é"], "\n\n")


def test_where_all_peers_share_the_cores_waiting_threads_of_torch_sleep(tmp_path):
    """OpenMP reads the variable when torch is loaded. A worker that others reach has its cores for
    itself, and spins."""
    code = """
import os, sys
from murmuration.worker.cli import main

class First:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("OMP_WAIT_POLICY"), flush=True)
            os._exit(0)

sys.meta_path.insert(0, First())
main()
"""
    plain = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    for words, told in (
        (("up",), "passive"),
        (("up", "--listen", "0.0.0.0:0"), "None"),
        (("generate", "nowhere", ""), "passive"),
    ):
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, *words],
            cwd=tmp_path,
            env=plain,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == told, done.stderr


def test_folders_made_for_a_worker_that_is_refused_do_not_stay(murmur):
    resumed = "up --resume --set task.text=text.txt --out"
    refused(murmur, 8, f"{resumed} runs/fresh")
    refused(murmur, 4, "up --out runs/fresh --set task.model=tny")
    assert not Path("runs").exists()
    Path("runs/there").mkdir(parents=True)
    refused(murmur, 8, f"{resumed} runs/there")
    assert Path("runs/there").is_dir()


class Ends(LlamaBytes):
    """Has three batches."""

    def batches(self, split: str, cursor: Cursor) -> Iterator[Batch]:
        yield from itertools.islice(super().batches(split, cursor), 3)


def test_the_log_of_a_worker_that_fails_in_training_stays(murmur):
    small = "{hidden_size=24, intermediate_size=32, num_hidden_layers=1}"
    settings = (f"task.name={__name__}:Ends", f"task.architecture={small}")
    code, _, err = murmur("up", "--out", "runs/new", *(p for s in settings for p in ("--set", s)))
    assert (code, err.count("\n")) == (4, 1), err
    assert "batches have ended" in err
    assert '"started"' in Path("runs/new/events.jsonl").read_text()


def test_checkpoints_stay_where_they_are_when_their_worker_is_refused(murmur):
    Path("here/checkpoints/step-00000005").mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        typed = f"up --out here --listen 127.0.0.1:{port} --fresh --set task.text=text.txt"
        refused(murmur, 7, typed)
    assert [path.name for path in Path("here").glob("check*")] == ["checkpoints"]


def test_trackers_of_the_configuration_are_told_too(murmur, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)  # as if it was not installed
    said = refused(murmur, 3, "up --insecure --set 'run.track=[\"trackio\"]'")
    assert said.startswith("murmur: --track trackio: it is not installed")


def failing(error: BaseException) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("ours to mend"),
        OSError(errno.EACCES, "out of memory"),
        ImportError("no module named x"),
        ValueError("out of memory"),
    ],
)
def test_a_defect_keeps_its_traceback(murmur, monkeypatch, error):
    monkeypatch.setattr(cli.cli, "main", failing(error))
    with pytest.raises(type(error)) as raised:
        murmur()
    assert raised.value is error


def test_a_commands_answer_is_the_exit_code_and_ctrl_c_is_130(murmur, monkeypatch):
    for answer in (0, 130, None):
        with monkeypatch.context() as patched:
            patched.setattr(cli.cli, "main", lambda answer=answer, **_: answer)
            assert murmur()[0] == (answer or 0)
    monkeypatch.setattr(cli.cli, "invoke", failing(KeyboardInterrupt()))
    assert murmur("up")[0] == 130


NO_MEMORY = "there is not enough memory; end something else.*"


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (ConfigError("first\n   second"), 3, "first second"),
        (PermissionError(errno.EACCES, "Denied", "a/b"), 3, "a/b: Denied; choose another folder"),
        (MemoryError(), 1, NO_MEMORY),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 1, NO_MEMORY),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), 1, NO_MEMORY),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 4 bytes"), 1, NO_MEMORY),
        (RuntimeError("std::bad_alloc"), 1, NO_MEMORY),
    ],
)
def test_an_error_is_one_line_with_its_exit_code(murmur, monkeypatch, error, code, says):
    monkeypatch.setattr(cli.cli, "main", failing(error))
    assert re.fullmatch(f"murmur: {says}", refused(murmur, code, "up"))


def test_a_terminal_that_knows_ascii_only_is_written_to(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    monkeypatch.setattr(sys, "argv", ["murmur", "--version"])
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with pytest.raises(SystemExit):
        cli.main()
    print_line("1 → 2 of zürich, caf\udce9")
    assert written.getvalue().endswith(b"1 ? 2 of z?rich, caf?\n")


def test_the_file_of_a_joiner_may_stand_anywhere_and_be_called_anything(tmp_path):
    (tmp_path / "run").touch()
    for words in (("a:1", "run.toml", "b:2"), ("run.toml", "a:1", "b:2")):
        assert addresses_and_run(words, None) == (("a:1", "b:2"), Path("run.toml"))
    assert addresses_and_run(("a:1", str(tmp_path / "run")), None)[1] == tmp_path / "run"
    assert addresses_and_run(("a:1",), Path("x")) == (("a:1",), Path("x"))


def completed(*args: str, incomplete: str = "") -> list[str]:
    shell = ShellComplete(cli.cli, {}, "murmur", "_MURMUR_COMPLETE")
    return [item.value for item in shell.get_completions(list(args), incomplete)]


def test_presets_commands_and_options_are_completed():
    assert sorted(options.PRESETS) == sorted(PRESETS)
    for command in ("up", "swarm"):
        assert completed(command, "--preset", incomplete="str") == ["streaming", "streaming-noloco"]
    assert completed("join", "h:1", "--preset", incomplete="d") == ["diloco", "ddp"]
    assert completed(incomplete="sta") == ["status"]
    assert {"--json", "--preset"} <= set(completed("up", incomplete="--"))


def test_what_the_script_calls_answers_without_torch():
    env = {**os.environ, "_MURMUR_COMPLETE": "bash_complete", "COMP_CWORD": "3"}
    env["COMP_WORDS"] = "murmur swarm --preset no"
    code = "import sys\nfrom murmuration.worker.cli import main\ntry: main()\n"
    code += "finally: assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout.split() == ["plain,noloco"], done.stderr
