"""A worker's folder on a disk that is full."""

import errno
import json
import os

import pytest
from filelock import FileLock

from murmuration.protos.files import read_json
from murmuration.worker.errors import ConfigError
from murmuration.worker.folder import EventLog, alone_in, is_taken, leave_json
from tests.support.full_disk import no_file_above
from tests.support.refusals import one_line


def test_events_go_on_and_one_warning_says_that_they_are_not_written(tmp_path):
    told: list[dict[str, object]] = []
    log = EventLog(tmp_path, told.append, lambda event: event.setdefault("peer", "a"))
    log({"event": "round", "round": 1})
    with no_file_above(0):
        for number in (2, 3, 4):
            log({"event": "round", "round": number})
    log({"event": "round", "round": 5})
    log.close()
    log({"event": "round", "round": 6})
    warning = told.pop(1)
    assert warning["peer"] == "a"
    assert f"missing in {tmp_path}/events.jsonl: File too large" in str(warning["text"])
    assert [event["round"] for event in told] == [1, 2, 3, 4, 5, 6]
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    first, missing, last = (json.loads(line) for line in lines)
    assert missing["text"].startswith("3 events are missing here")
    assert (first["round"], last["round"]) == (1, 5)


def test_a_worker_does_not_begin_on_a_full_disk(tmp_path):
    refused = one_line(ConfigError, "File too large; make room there")
    with no_file_above(1000), refused, alone_in(tmp_path / "out"):
        raise AssertionError("it has begun")
    assert list(tmp_path.iterdir()) == []
    with alone_in(tmp_path / "out"):
        pass


def test_a_document_that_cannot_be_written_is_a_warning(tmp_path):
    told: list[dict[str, object]] = []
    with no_file_above(3):
        leave_json(tmp_path / "result.json", {"a": 1}, told.append)
    assert [event["event"] for event in told] == ["warning"]
    assert list(tmp_path.iterdir()) == []
    leave_json(tmp_path / "result.json", {"a": b"of another peer"}, told.append)
    assert read_json(tmp_path / "result.json") == {"a": "b'of another peer'"}


def test_it_is_known_whether_a_worker_writes_there(tmp_path):
    assert not is_taken(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with alone_in(tmp_path / "out"):
        assert is_taken(tmp_path / "out")
    assert not is_taken(tmp_path / "out")
    with alone_in(tmp_path / "out"):  # looking has not taken it
        pass


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (errno.ENOLCK, "gives no locks, as NFS without a lock daemon; choose another folder"),
        (errno.ENOTSUP, "gives no locks"),
        (errno.EROFS, "Read-only file system; choose another folder with --out"),
        (errno.EACCES, "Permission denied; choose another folder"),
        (errno.ENOSPC, "No space left on device; make room there, or choose another folder"),
        (errno.ELOOP, "Too many levels of symbolic links; choose another folder"),
    ],
)
def test_a_folder_that_cannot_be_used_says_why_and_what_to_do(tmp_path, monkeypatch, code, says):
    def refuse(_lock: FileLock, timeout: float) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(FileLock, "acquire", refuse)
    with one_line(ConfigError, says), alone_in(tmp_path):
        raise AssertionError("it has begun")


def test_a_file_and_a_loop_of_links_are_no_folders(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    for name, says in [
        ("file", "it is a file; choose"),
        ("loop", "File exists; choose"),
        ("file/out", f"^--out {tmp_path}/file/out: Not a directory; choose another folder"),
    ]:
        with pytest.raises(ConfigError, match=says), alone_in(tmp_path / name):
            raise AssertionError("it has begun")


@pytest.mark.parametrize("pipe", [False, True], ids=["link", "pipe"])
def test_a_log_that_leads_elsewhere_is_not_written(tmp_path, pipe):
    log, elsewhere = tmp_path / "events.jsonl", tmp_path / "elsewhere"
    elsewhere.write_text("mine")
    if pipe:
        os.mkfifo(log)
    else:
        log.symlink_to(elsewhere)
    with pytest.raises(ConfigError, match="is no ordinary file: remove it"), alone_in(tmp_path):
        pass
    assert elsewhere.read_text() == "mine"
