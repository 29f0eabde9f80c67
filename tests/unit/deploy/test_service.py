"""The systemd unit: what systemd itself says of it, and that it fits the command."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from murmuration.protos.exit_codes import ExitCode
from murmuration.worker.cli.commands import join, up
from murmuration.worker.node.supervision import Systemd

UNIT = Path(__file__).parents[3] / "deploy" / "murmuration.service"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_has_nothing_to_say_of_the_unit(tmp_path):
    unit = tmp_path / UNIT.name  # it asks for the program too
    unit.write_text(UNIT.read_text().replace("/usr/local/bin/murmur", shutil.which("true") or ""))
    verified = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert (verified.returncode, verified.stdout + verified.stderr) == (0, "")


def test_a_worker_is_not_started_again_where_that_cannot_help():
    (codes,) = re.findall(r"RestartPreventExitStatus=(.*)", UNIT.read_text())
    assert {ExitCode(int(code)) for code in codes.split()} == {
        *(ExitCode.USAGE, ExitCode.CONFIGURATION, ExitCode.TASK, ExitCode.MANIFEST_REFUSED),
        *(ExitCode.CHECKPOINT, ExitCode.NOT_ADMITTED),
    }


def test_the_watchdog_is_one_that_the_worker_feeds():
    assert "Type=notify\n" in UNIT.read_text()
    (seconds,) = re.findall(r"WatchdogSec=(\d+)\n", UNIT.read_text())
    told = {"NOTIFY_SOCKET": "/run/systemd/notify", "WATCHDOG_USEC": f"{seconds}000000"}
    assert Systemd(told).watchdog_s == 60


def test_the_unit_types_what_the_commands_take():
    typed = set(re.findall(r"--[a-z]+", UNIT.read_text())) - {"--now"}
    for command in (up, join):
        assert typed <= {name for option in command.params for name in option.opts}
