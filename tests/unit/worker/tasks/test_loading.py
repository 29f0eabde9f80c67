"""load_task: the built-in name, a task of one's own, and one clear line for every mistake."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from murmuration.worker.tasks import Cursor, Generates, Task, TaskError, TextError, load_task

OWN_TASK = '''
import torch
from murmuration.worker.tasks import Batch, Cursor


class Line:
    """Fit y = slope * x."""

    def __init__(self, seed, slope):
        self.seed, self.slope = seed, slope

    def model(self):
        return torch.nn.Linear(1, 1, bias=False)

    def batches(self, split, cursor):
        while True:
            x = torch.full((4, 1), float(cursor.position))
            cursor = cursor.advance(4)
            yield Batch(x, self.slope * x, cursor)

    def loss(self, model, batch):
        return torch.nn.functional.mse_loss(model(batch.inputs), batch.targets)


def build(*, seed, slope=2.0):
    if slope == 0:
        raise ValueError("slope must not be 0")
    return Line(seed, slope)


def needs(*, seed, path):
    return Line(seed, 1.0)


def open_ended(**options):
    return Line(options["seed"], options["slope"])


def without_seed(slope):
    return Line(0, slope)


def empty(*, seed):
    return object()


number = 3
'''


@pytest.fixture(autouse=True)
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "own_task.py").write_text(OWN_TASK)
    (tmp_path / "broken_task.py").write_text("def build(:\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.chdir(tmp_path)
    yield
    for name in [each for each in sys.modules if each.partition(".")[0] in ("own_task", "worker")]:
        del sys.modules[name]


def message(name: str, /, **options: object) -> str:
    with pytest.raises(TaskError) as caught:
        load_task(name, seed=1, options=options)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_a_task_of_ones_own_is_found_in_the_working_directory():
    assert load_task("own_task:open_ended", seed=1, options={"slope": 5.0}).slope == 5.0
    task = load_task("own_task:build", seed=7, options={"slope": 3.0})
    assert isinstance(task, Task)
    assert not isinstance(task, Generates)
    model, batch = task.model(), next(task.batches("train", Cursor(seed=7, stream="a", position=2)))
    assert batch.cursor.position == 6
    with torch.no_grad():
        next(model.parameters()).fill_(3.0)
        assert task.loss(model, batch).item() == 0.0


def test_a_wrong_name_says_what_to_do():
    for name, expected in [
        ("llama-byte", "unknown task 'llama-byte'; did you mean 'llama-bytes'?"),
        ("zzz", "unknown task 'zzz'; use one of huggingface, llama-bytes"),
        (":build", "write it as 'package.module:factory'"),
        ("own_task:", "write it as 'package.module:factory'"),
        ("own-loop", "murmuration.Swarm(model"),
        ("absent_module:build", "no module named 'absent_module': install it, or"),
        ("broken_task:build", "importing 'broken_task' failed with SyntaxError"),
        ("own_task:bild", "module 'own_task' has no 'bild'; did you mean 'build'?"),
        ("own_task:number", "holds something that cannot be called as 'number'"),
        ("own_task:needs", "needs the option 'path'"),
        ("own_task:without_seed", "its factory must accept a keyword 'seed'"),
        ("own_task:empty", "returned 'object', which lacks model, batches, loss"),
    ]:
        assert expected in message(name)


def test_a_wrong_option_says_so():
    for name, options, expected in [
        ("llama-bytes", {"batchsize": 4}, "no option 'batchsize'; did you mean 'batch_size'?"),
        ("own_task:build", {"slop": 4}, "no option 'slop'; did you mean 'slope'?"),
        ("llama-bytes", {"seed": 4}, "'seed' is the run's own setting"),
        ("own_task:build", {"slope": 0}, "task 'own_task:build': slope must not be 0"),
    ]:
        assert expected in message(name, **options)

    with pytest.raises(TextError, match=r"'nowhere\.txt': no such file or folder"):
        load_task("llama-bytes", seed=1, options={"text": "nowhere.txt"})


def test_a_cursor_advances_by_samples_and_leaves_the_first_one_alone():
    first = Cursor(seed=1, stream="peer-a", position=5)
    assert first.advance(16) == Cursor(seed=1, stream="peer-a", position=21)
    assert first.position == 5
    with pytest.raises(ValueError, match="counts samples from 0, got -1"):
        Cursor(seed=1, stream="peer-a", position=-1)
