"""The file of measurements of `murmur plan --stages`: what is wrong in it is one line."""

import json
from pathlib import Path
from typing import Any

import pytest

from murmuration.worker.cli.plan_measurements import read_links
from murmuration.worker.errors import UsageError

MEASURED: dict[str, Any] = {
    "peers": ["ant", "bee", "cat", "dog"],
    "stage": [0, 1, 0, 1],
    "latency_s": [[None if i == j else 0.02 for j in range(4)] for i in range(4)],
    "rate_bytes_per_s": [[None if i == j else 1e6 for j in range(4)] for i in range(4)],
    "forward_s": [0.1, 0.1, 0.2, 0.2],
    "backward_s": [0.2, 0.2, 0.4, 0.4],
    "loss_s": [0.05, None, 0.1, None],
    "memory": [2, 3, 2, 3],
    "activation_bytes": 100_000,
    "microbatches": 2,
    "skip": 0.0,
}


def refused(path: Path) -> str:
    with pytest.raises(UsageError) as raised:
        read_links(path)
    line = str(raised.value)
    assert line.startswith(f"--links {path}: ")
    assert "\n" not in line
    return line


def written(folder: Path, **changes: Any) -> Path:
    """A file of measurements; entries that are changed to ... are left out."""
    path = folder / "links.json"
    entries = {name: value for name, value in (MEASURED | changes).items() if value is not ...}
    path.write_text(json.dumps(entries))
    return path


def test_one_peer_has_no_links(tmp_path: Path) -> None:
    changes = {"peers": ["ant"], "stage": [0], "latency_s": [[None]], "rate_bytes_per_s": [[None]]}
    alone = {"forward_s": [0.1], "backward_s": [0.2], "loss_s": [0.05], "memory": [None]}
    known = read_links(written(tmp_path, **changes, **alone))
    assert (known.names, known.stages, known.memory, known.filled) == (("ant",), ((0,),), None, ())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peers": ...}, 'peers is missing or empty; write names like ["w0", "w1"]'),
        ({"peers": ["ant", "bee", "ant", "dog"]}, "peers names 'ant' twice"),
        ({"peers": ["ant", "bee", 3, "dog"]}, "peers must all be names"),
        ({"latency_s": ...}, "latency_s is missing; it has a row for each of 4 peers"),
        ({"latency_s": [[0.1] * 4] * 3}, "latency_s has 3 entries; it needs one for each of 4"),
        ({"latency_s": [[0.1] * 3] * 4}, "latency_s, row of ant: it must be a list of 4 numbers"),
        ({"latency_s": [[-1] * 4] * 4}, "latency_s from ant to bee is -1; it must be a number at"),
        ({"latency_s": [[None] * 4] * 4}, "latency_s: nothing is measured between any two peers"),
        ({"rate_bytes_per_s": [[0] * 4] * 4}, "rate_bytes_per_s from ant to bee is 0; it must be"),
        ({"rate_bytes_per_s": [["fast"] * 4] * 4}, "is 'fast'; it must be a number above 0"),
        ({"rate_bytes_per_s": [[True] * 4] * 4}, "is True; it must be a number above 0"),
        ({"forward_s": [float("nan")] * 4}, "forward_s of ant is nan; it must be a number above 0"),
        ({"forward_s": 0.1}, "forward_s has no list; it needs one for each of 4 peers"),
        ({"activation_bytes": 1.5}, "activation_bytes is 1.5; it must be a whole number of at"),
        ({"microbatches": 0}, "microbatches is 0; it must be a whole number of at least 1"),
        ({"memory": [3, 3, 0, 3]}, "memory of cat is 0; it must be at least 1 visit"),
        ({"spread": -1}, "spread is -1; it must be a whole number of at least 0"),
        ({"skip": 1.0}, "skip is 1.0; it must be at least 0 and below 1"),
        ({"stage": [0, 1, 0, -1]}, "stage of dog is -1; it must be a number from 0 on"),
        ({"stage": [0, 2, 0, 2]}, "stage 1 is served by no peer, but stage 2 is"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_a_bad_entry_is_one_line(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    assert words in refused(written(tmp_path, **changes))


@pytest.mark.parametrize(
    ("text", "words"),
    [(None, "cannot be read: No such file"), ("{", "not JSON: "), ("[1]", "not an object")],
)
def test_a_file_that_is_none_is_one_line(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "links.json"
    if text is not None:
        path.write_text(text)
    assert words in refused(path)
