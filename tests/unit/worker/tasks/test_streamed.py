"""Data sets that are read as they come: their order, what is held out, and what is wrong."""

import itertools
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from murmuration.worker.tasks import Cursor, TaskError, TextError, load_task, next_batch
from murmuration.worker.tasks.text import Streamed

pytestmark = pytest.mark.filterwarnings("ignore")  # of datasets and transformers about themselves

WORDS = [f"bird {number:04d} flies; " for number in range(300)]


@pytest.fixture
def source(tmp_path: Path) -> dict[str, Any]:
    for part in range(3):
        lines = [json.dumps({"story": word, "n": 1}) for word in WORDS[part::3]]
        (tmp_path / f"{part}.jsonl").write_text("\n".join(lines))
    return {"path": "json", "data_files": str(tmp_path / "*.jsonl"), "cache_dir": str(tmp_path)}


def as_bytes(text: bytes) -> Any:
    return np.frombuffer(text, np.uint8).astype(np.int64)


def drawn(
    data: Streamed, split: str, stream: str = "a", position: int = 0, count: int = 200
) -> str:
    cursor = Cursor(seed=1, stream=stream, position=position)
    found = itertools.islice(data.windows(split, cursor, 11), count)
    return "".join(bytes(window[1:].tolist()).decode() for window in found)


def test_each_document_is_in_one_split_and_a_pass_has_all(source: dict[str, Any]) -> None:
    data = Streamed(source, "story", as_bytes, None)
    seen = {split: drawn(data, split, count=900) for split in ("train", "validation")}
    counts = {split: Counter(w for w in WORDS if w[:9] in text) for split, text in seen.items()}
    held_out = set(counts["validation"])
    assert held_out.isdisjoint(counts["train"])
    assert held_out | set(counts["train"]) == set(WORDS)
    assert 10 < len(held_out) < 60


def test_a_stream_has_an_order_of_its_own_and_goes_on_anywhere(source: dict[str, Any]) -> None:
    data = Streamed(source, "story", as_bytes, None)
    whole = drawn(data, "train")
    assert drawn(data, "train") == whole
    assert drawn(data, "train", "b") != whole
    assert drawn(data, "train", position=150, count=50) == whole[1500:]
    assert drawn(data, "validation", "a") == drawn(data, "validation", "b")


def test_documents_are_packed_with_an_end_between_them(source: dict[str, Any]) -> None:
    data = Streamed(source, "story", as_bytes, ord("|"))
    assert "; |bird" in drawn(data, "validation")


def test_a_task_learns_from_it(source: dict[str, Any]) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    model = {"model_type": "llama", "vocab_size": 256, "num_attention_heads": 2, **sizes}
    options = {"model": model, "dataset": source, "column": "story", "context": 16, "batch_size": 2}
    task: Any = load_task("huggingface", seed=3, options=options)
    batches = task.batches("train", Cursor(seed=3, stream="a"))
    first, second = next_batch(batches, "train"), next_batch(batches, "train")
    assert first.inputs.shape == first.targets.shape == (2, 16)
    assert (first.cursor.position, second.cursor.position) == (2, 4)
    task.loss(task.model(), first).backward()
    again = next_batch(task.batches("train", first.cursor), "train")
    assert again.inputs.equal(second.inputs)
    with pytest.raises(TaskError, match="leased"):
        task.loader()
    with pytest.raises(TaskError, match="both given"):
        load_task("huggingface", seed=3, options={**options, "text": "stdlib"})


def test_what_cannot_be_read_is_one_line(
    source: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TaskError, match=r"no column 'text' .*: set task.column to one of story, n"):
        Streamed(source, "text", as_bytes, None)
    with pytest.raises(TaskError, match=r"dataset \{.*nothing.*\}: \w+: "):
        Streamed({**source, "data_files": "nothing/here.jsonl"}, "story", as_bytes, None)
    data = Streamed(source, "story", as_bytes, None)
    with pytest.raises(TextError, match=r"too short: one sample takes 90,000 tokens of train"):
        next(iter(data.windows("train", Cursor(seed=1, stream="a"), 90_000)))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(TaskError, match=r"pip install 'murmuration\[datasets\]'"):
        Streamed(source, "story", as_bytes, None)
