"""Files that a run leaves, and the report of all peers from what one of them has kept."""

import io
import json
import math
from typing import Any

import pytest
from rich.console import Console

from murmuration.coordinator.records import Record
from murmuration.coordinator.report_files import leave_results, records_of, report_of_folder
from murmuration.protos.exit_codes import ExitCode, MurmurError
from tests.support.worker_status import result_event

RESULT = {
    "reason": "finished", "step": 100, "steps": 100, "preset": "diloco", "anchor_hash": "ab",
    "momentum_hash": "cd", "bytes_sent": 1000, "bytes_received": 900, "rounds_completed": 5,
    "val_loss": 2.5, "loss_unit": "nats per byte", "wall_s": 12.0,
    "verdicts": [{"kind": "disk", "peer": "w1", "cost": math.nan}],  # as any member may say
}  # fmt: skip


def kept(*peers: dict[str, Any]) -> dict[str, Any]:
    return {"run": "aa", "reporter": "w0", "peers": list(peers)}


def peer(name: str, result: object, state: str = "done", **more: Any) -> dict[str, Any]:
    known = {"peer": name, "address": f"{name}:7700", "stage": 0, "step": 60, "state": state}
    return known | {"result": result} | more


def test_all_peers_and_the_dead_with_what_was_last_known(tmp_path):
    document = kept(peer("w0", RESULT), peer("w1", RESULT), peer("w2", None, "dead"))
    (tmp_path / "results.json").write_text(json.dumps(document))
    report = report_of_folder(tmp_path, None, picture=False)
    peers = [(each["peer"], each["state"], each["step"]) for each in report["peers"]]
    assert peers == [("w0", "done", 100), ("w1", "done", 100), ("w2", "dead", 60)]
    assert (report["val_loss"], report["hashes_agree"], report["elapsed_s"]) == (2.5, True, 12.0)
    assert json.loads((tmp_path / "report.json").read_text()) == report
    dead = report["peers"][2]
    assert [dead[key] for key in ("rounds_completed", "bytes_sent", "bytes_received")] == [None] * 3
    assert report["bytes_sent_per_worker"] == 1000
    (row,) = (x for x in (tmp_path / "report.txt").read_text().splitlines() if " w2 " in x)
    assert row.split() == ["w2", "60", *("-" * 4), "dead"]
    (tmp_path / "results.json").unlink()
    assert report_of_folder(tmp_path, None) == report  # as of a swarm's folder


def test_the_checkpoint_is_the_one_on_this_machine(tmp_path):
    document = kept(
        *(peer(name, RESULT | {"checkpoint": f"runs/{name}/step-100"}) for name in ("a", "w0"))
    )
    (tmp_path / "results.json").write_text(json.dumps(document))
    assert report_of_folder(tmp_path, None, picture=False)["checkpoint"] == "runs/w0/step-100"


def test_of_stages_each_peer_has_its_own():
    staged = RESULT | {"stage": 1, "stages": 2}
    records = records_of(kept(peer("w0", staged, stage=1), peer("w1", None, "dead", stage=0)))
    assert [record.stage for record in records.values()] == [1, 0]
    assert records_of(kept(peer("w0", RESULT)))["w0"].stage is None


@pytest.mark.parametrize("text", ["{", "[]", '{"peers": []}', '{"peers": 3}'])
def test_what_is_no_report_is_one_line(tmp_path, text):
    with pytest.raises(MurmurError, match="holds neither") as raised:
        report_of_folder(tmp_path, None)
    assert raised.value.exit_code == ExitCode.CHECKPOINT  # as `murmur generate` of it
    for name in ("report.json", "results.json"):
        (tmp_path / name).write_text(text)
        with pytest.raises(MurmurError):
            report_of_folder(tmp_path, None)


@pytest.fixture
def finished() -> Record:
    record = Record("w0")
    record.apply(result_event("w0"), 1.0)
    return record


def test_leaves_json_picture_and_a_copy(tmp_path, finished):
    records, copied = [finished, Record("w1", exit_code=-9)], tmp_path / "deep" / "copy.json"
    silent = Console(quiet=True)
    report = leave_results(records, tmp_path, silent, settings={}, elapsed_s=2.0, json_path=copied)
    assert report["loss_png"] == str(tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "report.json").read_text() == copied.read_text()
    assert json.loads(copied.read_text())["peers"][1]["exit_code"] == -9


def test_a_folder_that_cannot_be_written_is_said_and_survived(tmp_path, finished):
    console = Console(file=(printed := io.StringIO()), width=120)
    (tmp_path / "file").write_text("in the way")
    report = leave_results([finished], tmp_path / "file", console, settings={}, elapsed_s=2.0)
    assert report["val_loss"] == 2.0
    assert "could not be written" in printed.getvalue()
