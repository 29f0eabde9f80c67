"""Text: where it comes from, and that held-out text is never trained on."""

import itertools
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from murmuration.worker.tasks import Cursor, TaskError, TextError, load_task, next_batch
from murmuration.worker.tasks.text import Corpus, Streamed, Windows, load_text
from tests.support.refusals import one_line
from tests.unit.worker.tasks.test_huggingface import TINY


def contents(corpus: Corpus) -> tuple[bytes, bytes]:
    return corpus.train.tobytes(), corpus.validation.tobytes()


TEXTS = [(f"<file {index}>" * 20).encode() for index in range(60)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "texts"
    for index, text in enumerate(TEXTS):
        path = root / f"part{index % 3}" / f"{index}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    return root


def test_of_a_file_the_last_tenth_is_held_out(tmp_path):
    path = tmp_path / "one.txt"
    path.write_bytes(bytes(range(200)))
    assert contents(load_text(str(path))) == (bytes(range(180)), bytes(range(180, 200)))


def test_windows_follow_one_another_and_have_each_token_once_as_target():
    windows = Windows(np.arange(101, dtype=np.uint8), 8)
    assert len(windows) == 12
    pairs = [windows[place] for place in range(len(windows))]
    assert [int(v) for inputs, _ in pairs for v in inputs] == list(range(96))
    assert [int(v) for _, targets in pairs for v in targets] == list(range(1, 97))
    assert len(Windows(np.zeros(8), 8)) == 0


def test_every_file_of_a_folder_is_on_one_side_whole_by_its_relative_name_alone(folder, tmp_path):
    """A glob splits as its folder does."""
    before = train, validation = contents(load_text(str(folder)))
    assert all((text in train) != (text in validation) for text in TEXTS)
    assert len(train + validation) == sum(map(len, TEXTS))
    assert 1 <= sum(text in validation for text in TEXTS) <= 15
    assert contents(load_text(f"{folder}/**/*.txt")) == before
    train, validation = contents(load_text(f"{folder}/part1/*.txt"))
    assert all((text in train + validation) == (n % 3 == 1) for n, text in enumerate(TEXTS))
    assert validation
    elsewhere = tmp_path / "moved" / "here"
    elsewhere.parent.mkdir()
    folder.rename(elsewhere)
    assert contents(load_text(str(elsewhere))) == before
    (elsewhere / "part0" / "new.txt").write_text("one file more")
    _, after = contents(load_text(str(elsewhere)))
    assert all((text in after) == (text in before[1]) for text in TEXTS)


def test_a_few_files_still_leave_text_on_both_sides(tmp_path):
    for index in range(3):
        (tmp_path / f"{index}.txt").write_text(f"{index}" * 100)
        train, validation = contents(load_text(str(tmp_path)))
        assert train
        assert validation
        assert index == 0 or not set(train) & set(validation)


def test_a_copy_of_a_held_out_file_is_not_trained_on(folder):
    _, validation = contents(load_text(str(folder)))
    held_out = next(text for text in TEXTS if text in validation)
    for index in range(40):
        (folder / f"copy{index}.txt").write_bytes(held_out)
    train, validation = contents(load_text(str(folder)))
    assert (held_out in train) != (held_out in validation)
    assert (train + validation).count(held_out) == 1


def test_hidden_binary_and_empty_files_are_passed_over(tmp_path):
    (tmp_path / ".git").mkdir()
    files = {"a.txt": b"aaaa" * 9, "b.txt": b"bbbb" * 9, "model.bin": b"m\0mm", "empty.txt": b""}
    for name, text in {**files, ".hidden": b"hhhh", ".git/config": b"gggg"}.items():
        (tmp_path / name).write_bytes(text)
    (tmp_path / "wide.txt").write_text("wide", encoding="utf-16")
    (tmp_path / "gone.txt").symlink_to("nowhere")
    corpus = load_text(str(tmp_path))
    train, validation = contents(corpus)
    assert sorted([train, validation]) == [b"aaaa" * 9, b"bbbb" * 9]
    assert corpus.warnings == (
        f"text {str(tmp_path)!r}: left out: 1 file without a byte (empty.txt); 1 file by "
        "links that lead nowhere (gone.txt); 1 file with zero bytes, binary or in UTF-16 "
        "(model.bin); 1 file in UTF-16 (wide.txt)",
    )


def test_a_byte_order_mark_is_no_part_of_a_text_and_zero_bytes_are_told(tmp_path):
    (tmp_path / "a.txt").write_text("some text" * 9, encoding="utf-8-sig")
    for source in ("a.txt", "."):
        corpus = load_text(str(tmp_path / source))
        assert corpus.train.tobytes().startswith(b"some text")
        assert corpus.warnings == ()
    (tmp_path / "b.bin").write_bytes(b"\0\1" * 99)
    (told,) = load_text(str(tmp_path / "b.bin")).warnings
    assert told.endswith("b.bin' holds zero bytes, as binary files do")


def test_a_file_in_the_working_directory_called_stdlib_is_not_meant(tmp_path, monkeypatch):
    (tmp_path / "stdlib").write_text("mine" * 5)
    monkeypatch.chdir(tmp_path)
    assert load_text("stdlib").train.size > 3_000_000
    assert load_text("./stdlib").train.size == 18


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("missing.txt", r"no such file or folder \(looked at .*missing\.txt\): name one"),
        ("*.nothing", r"no file matches: check the pattern"),
        ("empty", r"the folder holds no file: put text"),
        ("short.txt", r"too short: 9 bytes to train on, but one sample takes 100: give more"),
        ("zero.txt", r"too short: 0 bytes to train on"),
        ("wide.txt", r"the file is in UTF-16: make it UTF-8, as with `iconv"),
        ("loop.txt", r"the link leads to loop\.txt, and from there nowhere: mend it"),
        ("binary", r"no file .*: 4 files with zero bytes.* \(0\.bin, 1\.bin, 2\.bin, \.\.\.\)"),
        ("wide", r"no file holds text: 1 file in UTF-16 \(a\.txt\): make it UTF-8"),
        ("hollow", r"2 files without a byte \(a, b\): put text into it"),
        ("loops/*", r"1 file by links that lead nowhere \(self\): put text"),
    ],
)
def test_text_that_cannot_be_used_says_why_in_one_line(tmp_path, monkeypatch, source, expected):
    (tmp_path / "empty").mkdir()
    wide, binary = ("wide" * 999).encode("utf-16"), b"\0\1" * 999
    files = {"short.txt": b"ten bytes!", "zero.txt": b"", "hollow/a": b"", "hollow/b": b""}
    files |= {"wide.txt": wide, "wide/a.txt": wide}
    files |= {f"binary/{index}.bin": binary for index in range(4)}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "loops").mkdir()
    for name in ("loop.txt", "loops/self"):
        (tmp_path / name).symlink_to(Path(name).name)
    monkeypatch.chdir(tmp_path)
    with one_line(TextError, expected):
        load_text(source, min_bytes=100)


def test_a_file_that_fails_to_open_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("text")

    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(TextError, match=r"cannot read .*a\.txt: Permission denied: make it"):
        load_text(str(tmp_path))


pytestmark = pytest.mark.filterwarnings("ignore")  # of datasets and transformers about themselves

WORDS = [f"bird {number:04d} flies; " for number in range(300)]


@pytest.fixture
def source(tmp_path: Path) -> dict[str, Any]:
    for part in range(3):  # and rows that hold nothing
        lines = [json.dumps({"story": word, "n": 1}) for word in (*WORDS[part::3], None)]
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


def test_each_document_is_in_one_split_and_a_pass_has_all(source):
    data = Streamed(source, "story", as_bytes, None)
    seen = {split: drawn(data, split, count=900) for split in ("train", "validation")}
    counts = {split: Counter(w for w in WORDS if w[:9] in text) for split, text in seen.items()}
    held_out = set(counts["validation"])
    assert held_out.isdisjoint(counts["train"])
    assert held_out | set(counts["train"]) == set(WORDS)
    assert "None" not in "".join(seen.values())
    assert 10 < len(held_out) < 60
    packed = Streamed(source, "story", as_bytes, ord("|"))  # with an end between them
    assert "; |bird" in drawn(packed, "validation")


def test_a_stream_has_an_order_of_its_own_and_goes_on_anywhere(source):
    data = Streamed(source, "story", as_bytes, None)
    whole = drawn(data, "train")
    assert drawn(data, "train") == whole
    assert drawn(data, "train", "b") != whole
    assert drawn(data, "train", position=150, count=50) == whole[1500:]
    assert drawn(data, "validation", "a") == drawn(data, "validation", "b")


def test_a_task_learns_from_it(source):
    options = {"model": TINY, "dataset": source, "column": "story", "context": 16, "batch_size": 2}
    task: Any = load_task("huggingface", seed=3, options=options)
    batches = task.batches("train", Cursor(seed=3, stream="a"))
    first, second = next_batch(batches, "train"), next_batch(batches, "train")
    assert first.inputs.shape == first.targets.shape == (2, 16)
    assert (first.cursor.position, second.cursor.position) == (2, 4)
    task.loss(task.model(), first).backward()
    assert next_batch(task.batches("train", first.cursor), "train").inputs.equal(second.inputs)
    with pytest.raises(TaskError, match="leased"):
        task.loader()
    with pytest.raises(TaskError, match="both given"):
        load_task("huggingface", seed=3, options={**options, "text": "stdlib"})


def test_what_cannot_be_read_is_one_line(source, monkeypatch):
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
