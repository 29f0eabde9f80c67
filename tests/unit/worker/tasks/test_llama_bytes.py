"""The built-in task: samples by cursor, loss, generation."""

from itertools import islice
from pathlib import Path

import pytest
import torch

from murmuration.worker.tasks import Batch, Cursor, TaskError, TextError
from murmuration.worker.tasks.llama_bytes import LlamaBytes

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 2}
START = Cursor(seed=3, stream="peer-a")


@pytest.fixture
def task(tmp_path: Path) -> LlamaBytes:
    """Text that tells where it is from: lower case is trained on, capitals are held out."""
    path = tmp_path / "text.txt"
    path.write_text("abcdefghijklmnopqrs" * 90 + "ABCDEFGHIJKLMNOPQRS" * 10)
    return LlamaBytes(seed=1, text=str(path), batch_size=4, context_bytes=16, architecture=SMALL)


def test_its_loader_has_the_text_once(task):
    pairs = list(task.loader())
    assert pairs[0][0].shape == pairs[0][1].shape == (4, 16)
    assert sum(len(targets) for _, targets in pairs) == (task.corpus.train.size - 1) // 16
    task.loss(task.model(), Batch(*pairs[0], START)).backward()


def test_a_sample_is_the_same_whatever_batch_it_falls_into(task):
    rows = torch.cat([batch.inputs for batch in islice(task.batches("train", START), 3)])
    task.batch_size = 3
    assert torch.equal(next(task.batches("train", START.advance(5))).inputs, rows[5:8])


def test_no_sample_of_one_split_holds_text_of_the_other(task):
    for split, known in (("train", str.islower), ("validation", str.isupper)):
        for batch in islice(task.batches(split, START), 100):
            for rows in (batch.inputs, batch.targets):
                assert known(bytes(rows.flatten().tolist()).decode())
    with pytest.raises(ValueError, match="'train' or 'validation', not 'test'"):
        task.batches("test", START)


def test_generation_depends_on_its_seed_and_outlives_the_context_and_is_streamed(task):
    model = task.model()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    whole = task.generate(model, "def ", n_tokens=50, temperature=1.0, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert whole == task.generate(model, "def ", n_tokens=50, temperature=1.0, seed=1)
    assert whole != task.generate(model, "def ", n_tokens=50, temperature=1.0, seed=2)
    assert 1 <= len(whole) <= 50
    read, forward = 0, model.forward

    def counting(*args: object) -> torch.Tensor:
        nonlocal read
        read += 1
        return forward(*args)

    model.forward = counting
    pieces = task.stream(model, "def ", 50, 1.0, 1)
    first = next(pieces)
    assert read < 6  # a character takes at most four bytes, and one more where it is none
    assert torch.is_inference_mode_enabled() is False
    assert first + "".join(pieces) == whole
    assert read == 50


def test_wrong_options_are_refused(tmp_path):
    with pytest.raises(TaskError, match="batch_size must be an integer of at least 1, got 0"):
        LlamaBytes(seed=0, batch_size=0)
    with pytest.raises(TaskError, match="leave vocab_size at 256"):
        LlamaBytes(seed=0, architecture={"vocab_size": 300})
    with pytest.raises(TaskError, match="max_position_embeddings must be an integer"):
        LlamaBytes(seed=0, context_bytes=0)
    path = tmp_path / "short.txt"
    path.write_text("a" * 100)
    with pytest.raises(TextError, match="10 bytes to hold out, but one sample takes 17"):
        LlamaBytes(seed=0, text=str(path), context_bytes=16)
