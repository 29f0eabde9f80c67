"""What a peer may never do to another: a client on our own protos attacks real workers."""

from pathlib import Path

import pytest

from tests.support.stranger import handing_out, serving
from tests.support.workers import SMALL, WorkerProcess
from worker.config import load_config
from worker.manifest import Manifest

INFECTED = """
from pathlib import Path
Path(__file__).with_name("it ran").touch()
def build(**options): raise ValueError("it ran")
"""


def test_a_joiner_loads_no_code_and_reads_no_file_on_a_peers_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "infected.py").write_text(INFECTED)
    monkeypatch.chdir(tmp_path)
    for number, setting in enumerate(
        ("task.name=infected:build", "inner.optimizer=infected:build", f"task.text={tmp_path}")
    ):
        manifest = Manifest.of(load_config(None, [*SMALL[1::2], setting]), []).plain()
        with serving({"Control/Join": handing_out(manifest)}) as address:
            joiner = WorkerProcess(["join", address, "--out", f"out{number}"], f"j{number}")
            try:
                assert joiner.wait() == 4
            finally:
                joiner.end()
        assert joiner.errors.count("\n") == 1
        assert f"only others have named it: if you trust it, add --set {setting}" in joiner.errors
        assert not (tmp_path / "it ran").exists()
        assert not (tmp_path / f"out{number}").exists()
