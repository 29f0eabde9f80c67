"""The commands refuse bad words, and start quickly."""

import subprocess
import sys
from contextlib import chdir

import pytest

from murmuration.coordinator import cli
from murmuration.worker.identity.certificates import IdentityError, Role
from tests.support.commands import refused


@pytest.mark.parametrize(
    ("command", "typed", "code", "words"),
    [
        (cli.swarm, "--workers 0", 2, "--workers 0: one machine takes 1 to 64"),
        (cli.swarm, "--workers 65", 2, "--workers 65: one machine takes 1 to 64"),
        (cli.swarm, "--resume", 2, "name the folder"),
        (cli.swarm, "--resume --out nowhere", 2, "no folder nowhere"),
        (cli.swarm, "--out file/below", 2, "cannot be made"),
        (cli.swarm, "--set stages.count=2", 3, "counted by --stages"),
        (cli.coordinator, "--listen 7600", 2, "is no HOST:PORT"),
        (cli.coordinator, "--listen 127.0.0.1:99999", 2, "is no HOST:PORT"),
        (cli.coordinator, "--web page", 2, "--web page: write a port of this machine"),
        (cli.swarm, "--web :8900", 2, "--web :8900: write a port of this machine"),
        (cli.status, "nowhere", 2, "is no HOST:PORT"),
    ],
)
def test_bad_input_is_one_line_with_its_exit_code(command, typed, code, words, tmp_path):
    (tmp_path / "file").write_text("")
    with chdir(tmp_path):
        assert words in refused(command, code, *typed.split())
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_importing_the_commands_imports_nothing_heavy():
    heavy = {"torch", "grpc", "matplotlib", "rich", "numpy", "starlette", "uvicorn"}
    code = f"import sys, murmuration.coordinator.cli; print(*sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_a_coordinator_of_a_network_begins_the_runs_authority(tmp_path):
    assert cli._identity_for(tmp_path / "a", public=False, insecure=False) == (None, None)
    assert cli._identity_for(tmp_path / "a", public=True, insecure=True) == (None, None)
    assert not (tmp_path / "a").exists()
    identity, authority = cli._identity_for(tmp_path / "a", public=True, insecure=False)
    assert identity is not None
    assert authority is not None
    assert (identity.role, identity.authority) == (Role.COORDINATOR, authority.certificate)
    again, _ = cli._identity_for(tmp_path / "a", public=False, insecure=False)
    assert again == identity
    (tmp_path / "file").write_text("")
    with pytest.raises(IdentityError, match="choose another folder"):
        cli._identity_for(tmp_path / "file", public=True, insecure=False)


def test_a_coordinator_process_ends_cleanly_when_told_to():
    command = [sys.executable, "-m", "murmuration.coordinator.cli"]
    command += ["--listen", "127.0.0.1:0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert '"event": "listening"' in process.stdout.readline()
        process.terminate()
        assert process.stdout.read() == ""
    assert process.returncode == 0
