"""The report of all peers of a run without a coordinator: from what a worker has kept of them, or
from what they say while they live."""

import json
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator import Failure
from coordinator.rendezvous.records import Record
from coordinator.report.report import Report, build_report
from coordinator.report.results import leave_results
from coordinator.report.status import ask
from coordinator.report.watch import Watch
from protos.events import address_in, float_of, int_of, names_of, place_of, text_of
from protos.exit_codes import ExitCode
from protos.files import RESULTS

if TYPE_CHECKING:
    from rich.console import Console

    from protos.identity import Identity

_REPORT = "report.json"
_ASK_S = 5.0
_GONE = ("dead", "left")
Document = Mapping[str, Any]


def report_of_folder(folder: Path, console: "Console | None", *, picture: bool = True) -> Report:
    """Of the run that a worker, a swarm or a coordinator has left there; printed if there is a
    console. Of a worker's, the report is made anew, and written beside it; of one that goes on, it
    is that of its peers now.

    Raises:
        Failure: there is none.
    """
    if (folder / RESULTS).exists():
        document = _read(folder / RESULTS)
        records = list(records_of(document).values())
        if not records:
            raise _nothing(folder)
        elapsed_s = max((float_of(r.result or {}, "wall_s") or 0.0 for r in records), default=0.0)
        settings = {"reporter": document.get("reporter")}
        return leave_results(
            records, folder, console, settings=settings, elapsed_s=elapsed_s, picture=picture
        )
    if not (folder / _REPORT).exists():
        if (address := address_in(folder)) is not None:
            from protos.identity import Identity, IdentityError

            with suppress(Failure, IdentityError):  # nobody there any more, or not for this peer
                return report_of_swarm(address, Identity.load(folder), console)
        raise _nothing(folder)
    report = _read(folder / _REPORT)
    if console is not None:
        from coordinator.report.printer import print_report

        print_report(report, console)
    return report


def report_of_swarm(address: str, identity: "Identity | None", console: "Console | None") -> Report:
    """Of a run under way, or just over, by what its peers say. Raises Failure: nobody answers."""
    first, members, answers = Watch(address, partial(ask, identity=identity)).ask_all()
    known = {
        peer: _live(member, answers) for member in members if (peer := text_of(member, "peer"))
    }
    ended = ask(address, _ASK_S, identity, only="results")  # of those that have given theirs
    known |= {peer: each for peer, each in records_of(ended).items() if each.result is not None}
    settings = {"preset": text_of(first, "preset"), "steps": int_of(first, "steps")}
    elapsed_s = max((float_of(each, "up_s") or 0.0 for each in answers.values()), default=0.0)
    under_way = any(each.result is None and each.state not in _GONE for each in known.values())
    report = build_report(
        list(known.values()), settings=settings, elapsed_s=elapsed_s, under_way=under_way
    )
    if console is not None:
        from coordinator.report.printer import print_report

        print_report(report, console)
    return report


def records_of(document: Document) -> dict[str, Record]:
    """By peer, what a worker has kept: the result of each, or else the last that it knew."""
    peers = document.get("peers")
    known = [each for each in peers if isinstance(each, Mapping)] if isinstance(peers, list) else []
    results = [each["result"] for each in known if isinstance(each.get("result"), Mapping)]
    staged = any("stage" in result for result in results)
    records = {}
    for each in known:
        peer, result = text_of(each, "peer") or "?", each.get("result")
        record = records[peer] = Record(peer, address=text_of(each, "address") or "")
        record.state, record.step = text_of(each, "state") or "?", int_of(each, "step") or 0
        record.stage = int_of(each, "stage") if staged else None
        record.counted = False
        if isinstance(result, Mapping):
            record.apply({**result, "event": "result"}, 0.0)
    return records


def _live(member: Document, answers: Mapping[str, Document]) -> Record:
    """What is known of a peer now: by its own word, if it has answered."""
    peer = text_of(member, "peer") or "?"
    own = answers.get(peer)
    said: Document = member if own is None else own
    record = Record(peer, address=text_of(member, "address") or "", started=True)
    health, phase = text_of(member, "health") or "?", text_of(said, "phase") or "?"
    record.state = phase if own is not None or health == "alive" else health
    record.stage, record.counted = int_of(member, "stage"), own is not None
    record.step, record.steps = int_of(said, "step") or 0, int_of(said, "steps") or 0
    record.loss = float_of(said, "loss")
    traffic, rounds = (said.get(key) for key in ("traffic", "rounds"))
    if isinstance(traffic, Mapping):
        record.bytes_sent = int_of(traffic, "bytes_sent") or 0
        record.bytes_received = int_of(traffic, "bytes_received") or 0
    if isinstance(rounds, Mapping):
        record.rounds_completed = int_of(rounds, "completed") or 0
        record.rounds_failed = int_of(rounds, "failed") or 0
        record.steps_lost = int_of(rounds, "steps_lost") or 0
    if record.loss is not None:
        record.curve = [(record.step, record.loss)]
    if (val_loss := float_of(said, "val_loss")) is not None:
        record.val_curve = [(record.step, val_loss)]
    record.warn(names_of(said, "warnings"))
    verdicts = said.get("verdicts")
    for verdict in verdicts if isinstance(verdicts, list) else ():
        if isinstance(verdict, Mapping):
            record.located[place_of(verdict)] = dict(verdict)
    return record


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise Failure(f"{path} cannot be read: {error}", ExitCode.USAGE) from error
    if not isinstance(document, dict):
        raise Failure(f"{path} is no report: it holds no object", ExitCode.USAGE)
    return document


def _nothing(folder: Path) -> Failure:
    return Failure(
        f"{folder} holds neither {RESULTS} nor {_REPORT}: name the folder of a worker or a swarm "
        "that has ended, or HOST:PORT of a peer that lives",
        ExitCode.USAGE,
    )
