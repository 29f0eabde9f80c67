"""Files that a run leaves, and the report of all peers from what one of them has kept."""

import json
from pathlib import Path
from typing import Any

import pytest

from coordinator import Failure
from coordinator.report import results
from coordinator.report.printer import figure_lines
from coordinator.report.results import records_of, report_of_folder, report_of_swarm
from protos.exit_codes import ExitCode

RESULT = {
    "reason": "finished",
    "step": 100,
    "steps": 100,
    "preset": "diloco",
    "anchor_hash": "ab",
    "momentum_hash": "cd",
    "bytes_sent": 1000,
    "bytes_received": 900,
    "rounds_completed": 5,
    "val_loss": 2.5,
    "loss_unit": "nats per byte",
    "wall_s": 12.0,
}


def kept(*peers: dict[str, Any]) -> dict[str, Any]:
    return {"run": "aa", "reporter": "w0", "peers": list(peers)}


def peer(name: str, result: object, state: str = "done", **more: Any) -> dict[str, Any]:
    known = {"peer": name, "address": f"{name}:7700", "stage": 0, "step": 60, "state": state}
    return known | {"result": result} | more


def test_all_peers_and_the_dead_with_what_was_last_known(tmp_path: Path) -> None:
    document = kept(peer("w0", RESULT), peer("w1", RESULT), peer("w2", None, "dead"))
    (tmp_path / "results.json").write_text(json.dumps(document))
    report = report_of_folder(tmp_path, None, picture=False)
    assert [(each["peer"], each["state"], each["step"]) for each in report["peers"]] == [
        ("w0", "done", 100),
        ("w1", "done", 100),
        ("w2", "dead", 60),
    ]
    assert (report["val_loss"], report["hashes_agree"], report["elapsed_s"]) == (2.5, True, 12.0)
    assert json.loads((tmp_path / "report.json").read_text()) == report
    dead = report["peers"][2]
    assert [dead[key] for key in ("rounds_completed", "bytes_sent", "bytes_received")] == [None] * 3
    assert report["bytes_sent_per_worker"] == 1000
    (row,) = (x for x in (tmp_path / "report.txt").read_text().splitlines() if " w2 " in x)
    assert row.split() == ["w2", "60", *("-" * 6), "dead"]
    (tmp_path / "results.json").unlink()
    assert report_of_folder(tmp_path, None) == report  # as of a swarm's folder


def test_the_checkpoint_is_the_one_on_this_machine(tmp_path: Path) -> None:
    results = {name: RESULT | {"checkpoint": f"runs/{name}/step-100"} for name in ("a", "w0")}
    document = kept(*(peer(name, result) for name, result in results.items()))
    (tmp_path / "results.json").write_text(json.dumps(document))
    assert report_of_folder(tmp_path, None, picture=False)["checkpoint"] == "runs/w0/step-100"


def test_of_stages_each_peer_has_its_own() -> None:
    staged = RESULT | {"stage": 1, "stages": 2}
    records = records_of(kept(peer("w0", staged, stage=1), peer("w1", None, "dead", stage=0)))
    assert [record.stage for record in records.values()] == [1, 0]
    assert records_of(kept(peer("w0", RESULT)))["w0"].stage is None


@pytest.mark.parametrize("text", ["{", "[]", '{"peers": []}', '{"peers": 3}'])
def test_what_is_no_report_is_one_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(Failure, match="holds neither"):
        report_of_folder(tmp_path, None)
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(Failure):
        report_of_folder(tmp_path, None)


def test_of_a_run_under_way_by_what_each_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    members = [
        {"peer": "w0", "address": "w0:7700", "health": "alive", "phase": "training", "step": 40},
        {"peer": "w1", "address": "w1:7700", "health": "alive", "phase": "done", "step": 60},
        {"peer": "w2", "address": "w2:7700", "health": "dead", "phase": "training", "step": 30},
    ]
    verdict = {"kind": "disk", "peer": "w0", "cost": 0.0}
    said = {
        "peer": "w0",
        "preset": "noloco",
        "phase": "training",
        "step": 50,
        "steps": 60,
        "loss": 2.0,
        "up_s": 9.0,
        "members": members,
        "traffic": {"bytes_sent": 7, "bytes_received": 8},
        "rounds": {"completed": 2, "failed": 1},
        "verdicts": [verdict],
        "warnings": ["w0 and w1 contribute the same values"],
    }

    def ask(address: str, timeout_s: float, identity: object = None, only: str = "") -> Any:
        if only == "results":
            return kept(peer("w1", RESULT), peer("w2", None, "dead"))
        if address != "w0:7700":
            raise Failure(f"{address} does not answer", ExitCode.UNREACHABLE)
        return said

    monkeypatch.setattr(results, "ask", ask)
    report = report_of_swarm("w0:7700", None, None)
    assert [(each["peer"], each["state"], each["step"]) for each in report["peers"]] == [
        ("w0", "training", 50),
        ("w1", "done", 100),
        ("w2", "dead", 30),
    ]
    assert (report["steps"], report["elapsed_s"], report["verdicts"]) == (60, 9.0, [verdict])
    assert report["under_way"]
    said_lines = dict(figure_lines(report))
    assert said_lines["warning"] == "w0 and w1 contribute the same values"
    assert said_lines["under way"] == (
        "the run goes on, at step 100 of 60; peers: 1 training, 1 done, 1 dead"
    )
    assert said_lines["training loss"] == "2.00 now"
    assert not [line for line in said_lines.values() if line.startswith(("not ", "nothing"))]
    folder = tmp_path / "w0"  # of a worker that runs: it has left no results yet
    folder.mkdir()
    with pytest.raises(Failure, match="holds neither"):
        report_of_folder(folder, None)
    events = [{"event": "listening", "address": "w0:7700"}, {"event": "started"}]
    (folder / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in events))
    assert report_of_folder(folder, None) == report
    (folder / "events.jsonl").write_text(json.dumps(events[0] | {"address": "w9:7700"}))
    with pytest.raises(Failure, match="holds neither"):
        report_of_folder(folder, None)
