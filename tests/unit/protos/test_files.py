"""Files, logs and stdout on a disk that is full."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from murmuration.protos.files import LineLog, print_line, write_atomically
from tests.support.full_disk import no_file_above


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "report.json"
    write_atomically(path, b"old")
    with no_file_above(3), pytest.raises(OSError, match="File too large"):
        write_atomically(path, b"newer")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_log_takes_whole_lines_or_nothing_of_them(tmp_path):
    log = LineLog(tmp_path / "log")
    log.write("one")
    with no_file_above(7):
        for _ in range(2):
            with pytest.raises(OSError, match="No space"):
                log.write("much longer")
        log.write("to")
    log.write("three")
    log.close()
    log.write("again")
    assert (tmp_path / "log").read_text() == "one\nto\nthree\nagain\n"


def test_a_log_rotates_and_keeps_its_earlier_part(tmp_path):
    path = tmp_path / "log"
    path.write_text("from before\n")
    log = LineLog(path, most_bytes=20)
    for number in range(9):
        log.write(f"line {number}")
        assert path.stat().st_size <= 20
    log.close()
    assert (Path(f"{path}.1").read_text() + path.read_text()) == "line 5\nline 6\nline 7\nline 8\n"
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("to", "before"),
    [("stdout", ""), ("stderr", ""), ("stderr", "sys.stderr.close(); ")],
)
def test_a_line_that_cannot_be_written_is_no_error_then_nor_at_the_end(to, before):
    program = f"import sys; from murmuration.protos.files import print_line; {before}"
    program += f"[print_line('x', to={to!r}) for _ in range(3)]"
    with open("/dev/full", "w") as full:
        streams: dict[str, Any] = {"stdout": full, "stderr": subprocess.PIPE, to: full}
        ended = subprocess.run([sys.executable, "-c", program], **streams)
    assert (ended.returncode, ended.stderr or b"") == (0, b"")


def test_a_line_that_nothing_takes_holds_nobody_up_and_is_counted(monkeypatch):
    """A full pipe; a stopped terminal is one too."""
    reads, writes = os.pipe()
    os.write(writes, bytes(fcntl.fcntl(writes, fcntl.F_SETPIPE_SZ, 4096)))
    with open(reads, "rb") as pipe, open(writes, "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        at_the_end = Mock()
        monkeypatch.setattr("atexit.register", at_the_end)
        for ends in (False, True):
            for _ in range(2):
                print_line("lost")
            assert set(os.read(pipe.fileno(), 1 << 20)) == {0}
            tell, *given = at_the_end.call_args.args
            assert tell(*given) if ends else not print_line("told")
            full.flush()
            told = os.read(pipe.fileno(), 1 << 20)
            last = b"" if ends else b"told\n"
            assert told == b"2 lines are missing here, as nothing took them\n" + last
            os.write(writes, bytes(4096))
