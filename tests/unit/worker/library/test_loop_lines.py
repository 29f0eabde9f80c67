"""The words for a loop of one's own: through `logging`, else on stderr; on stdout if asked."""

import io
import logging
import sys

import torch
from torch import nn

from murmuration import Swarm
from murmuration.worker.library.arguments import LoopLines, log
from tests.support.peers import row

ROUND = {"event": "round", "round": 0, "fragment": 0, "contributors": 2, "exchange_s": 0.1,
         "stall_s": 0.0}  # fmt: skip
EVENTS = [
    {"event": "listening", "peer": "a", "address": "127.0.0.1:7700"},
    {"event": "started", "step": 0, "group": ["a", "b"]},
    {"event": "member", "peer_changed": "b", "health": "dead"},
    {"event": "awaiting", "here": ["a"], "wanted": 2},
    ROUND,
    ROUND | {"round": 1},
    {"event": "warning", "text": "say --advertise HOST:PORT", "at": "..."},
    {"event": "confirmed", "iteration": 3, "replica": "x"},
]
LINES = [
    "a is reached at 127.0.0.1:7700, from this machine only; others join with "
    "join='127.0.0.1:7700'",
    "started at step 0 with a, b",
    "b is dead",
    "waits for 1 more peer to start (here: a)",
    "the first round 0 of fragment 0: 2 peers, 0.10 s under way, 0.00 s waited for",
    "warning: say advertise='HOST:PORT'",
]


def tell(lines: LoopLines) -> None:
    for event in EVENTS:
        lines(event)


def test_events_are_lines_of_logging_at_their_levels(caplog):
    with caplog.at_level(logging.INFO):
        tell(LoopLines())
    assert [record.getMessage() for record in caplog.records] == LINES
    assert [record.levelname for record in caplog.records] == [*(["INFO"] * 5), "WARNING"]
    caplog.clear()
    with caplog.at_level(logging.DEBUG):
        tell(LoopLines())
    assert [r.getMessage() for r in caplog.records if r.levelname == "DEBUG"] == [
        "round round=1 fragment=0 contributors=2 exchange_s=0.1 stall_s=0.0",
        "confirmed iteration=3 replica=x",
    ]


@row("stderr that is closed, or whose reader has gone", "shared", "lines are left out")
def test_without_logging_the_same_lines_are_on_stderr_but_for_those_not_asked_for(
    monkeypatch, capsys
):
    monkeypatch.setattr(logging.root, "handlers", [])
    tell(LoopLines())
    assert capsys.readouterr() == ("", "".join(f"murmuration: {line}\n" for line in LINES))
    last = f"murmuration: {LINES[-1]}\n"
    for of, what, value, said in [
        (log, "level", logging.WARNING, last),
        (log, "handlers", [logging.NullHandler()], ""),
        (logging.root.manager, "disable", logging.INFO, last),
    ]:
        with monkeypatch.context() as program:
            program.setattr(of, what, value)
            tell(LoopLines())
        assert capsys.readouterr().err == said, what
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    sys.stderr.close()
    tell(LoopLines())


@row("`logging.config.dictConfig`, which disables other loggers", "told", "as it is configured")
def test_logging_that_is_configured_later_is_used_from_then_on(monkeypatch, capsys):
    monkeypatch.setattr(logging.root, "handlers", [])
    lines = LoopLines()
    lines(EVENTS[1])
    monkeypatch.setattr(logging.root, "handlers", [logging.StreamHandler()])
    monkeypatch.setattr(log, "disabled", True)
    lines(EVENTS[1])  # at INFO, which such a program has not asked for
    lines(EVENTS[6])
    assert capsys.readouterr().err == f"murmuration: {LINES[1]}\n{LINES[5]}\n"


def test_progress_prints_the_lines_of_murmur_up_and_nothing_twice(monkeypatch, capsys):
    monkeypatch.setattr(logging.root, "handlers", [])
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Swarm(model, optimizer, inner_steps=2, steps=4, name="me", progress=True) as swarm:
        while not swarm.done:
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            swarm.report(1.5)
    out, err = capsys.readouterr()
    said = [line.partition(" s  ")[2] for line in out.splitlines()]
    assert (err, said[0][:27]) == ("", "me is reached at 127.0.0.1:")
    assert "5 parameters, preset diloco, a round every 2 of 4 steps, on cpu" in said
    assert "started at step 0 with me" in said
    assert any(line.startswith("step 4/4  loss 1.500  rounds 2  sent") for line in said)
