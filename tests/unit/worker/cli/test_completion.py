"""Commands, options and names are completed by the machinery that the shells' scripts call."""

import os
import subprocess
import sys

from click.shell_completion import ShellComplete

from murmuration.algorithms.plan import PRESETS
from murmuration.worker.cli import cli, options


def completed(*args: str, incomplete: str = "") -> list[str]:
    shell = ShellComplete(cli, {}, "murmur", "_MURMUR_COMPLETE")
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
