"""Models of transformers as a task: drawn or from a folder, with a tokenizer or without, LoRA."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from murmuration.worker.tasks import Batch, Cursor, TaskError, TextError, load_task, next_batch
from murmuration.worker.training.model import trained_parameters
from tests.support.refusals import one_line

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and peft about themselves

TINY = {"model_type": "llama", "vocab_size": 256, "hidden_size": 16, "intermediate_size": 32}
TINY |= {"num_hidden_layers": 2, "num_attention_heads": 2}
GPT2 = {"model_type": "gpt2", "vocab_size": 256, "n_positions": 64, "n_embd": 16, "n_head": 2}
LORA = {"r": 2, "target_modules": ["q_proj"]}


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("the flock turns as one, and no bird leads. " * 60)
    return str(path)


def task_of(text: str, /, **options: Any) -> Any:
    given = {"model": TINY, "text": text, "context": 16, "batch_size": 2, **options}
    return load_task("huggingface", seed=3, options=given)


def values(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_what_is_drawn_depends_on_the_seed_alone(text):
    for lora in (None, LORA):
        task = task_of(text, lora=lora)
        torch.manual_seed(1)
        first, state = values(task.model()), torch.get_rng_state()
        assert torch.equal(first, values(task.model()))
        assert torch.equal(state, torch.get_rng_state())
    named = trained_parameters(task.model())  # of LoRA only the adapters
    assert named
    assert all("lora_" in name for name in named)


def test_a_batch_is_windows_of_the_text_and_the_loss_can_be_learned(text):
    task = task_of(text)
    assert task.loss_unit == "nats per byte"
    batch = next_batch(task.batches("train", Cursor(seed=3, stream="a")), "train")
    assert batch.inputs.shape == batch.targets.shape == (2, 16)
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
    model = task.model()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(20):
        optimizer.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(5.5, abs=0.3)
    assert losses[-1] < 4
    first = next(iter(task.loader()))
    assert first[0].shape == first[1].shape == (2, 16)
    task.loss(model, Batch(*first, batch.cursor)).backward()


def test_a_folder_is_read_and_written_adapters_merged(text, tmp_path):
    from transformers import AutoModelForCausalLM

    base = task_of(text).model()
    base.save_pretrained(tmp_path / "base")
    task = task_of(text, model=str(tmp_path / "base"), tokenizer="bytes", lora=LORA)
    model = task.model()
    with torch.no_grad():
        for parameter in trained_parameters(model).values():
            parameter.add_(0.1)
    tokens = next_batch(task.batches("validation", Cursor(seed=0, stream="a")), "v").inputs
    with torch.inference_mode():
        before = model(input_ids=tokens).logits
    (tmp_path / "out").mkdir()
    merged = task.to_huggingface(model, tmp_path / "out")
    merged.save_pretrained(tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.inference_mode():
        torch.testing.assert_close(again(input_ids=tokens).logits, before, atol=1e-5, rtol=0)
    (tmp_path / "base/model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    with one_line(TaskError, "model '.*base': "):
        task.model()
    (tmp_path / "base/model.safetensors").rename(tmp_path / "base/pytorch_model.bin")
    with one_line(TaskError, "pytorch_model.bin is not read"):
        task.model()


def test_a_tokenizer_of_ones_own(text, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    text_words = ["?", "the", "flock", "turns", "as", "one", ",", "and", "no", "bird", "leads", "."]
    words = {word: number for number, word in enumerate(text_words)}
    made = Tokenizer(models.WordLevel(words, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=made, unk_token="?").save_pretrained(tmp_path / "t")
    task = task_of(text, tokenizer=str(tmp_path / "t"))
    assert task.loss_unit == "nats per token"
    (tmp_path / "birds.txt").write_text("\N{BIRD} the " * 299)  # the cut is within a bird
    assert task_of(str(tmp_path / "birds.txt"), tokenizer=str(tmp_path / "t")).warnings == ()
    batch = next_batch(task.batches("train", Cursor(seed=3, stream="a")), "train")
    assert int(batch.inputs.max()) <= 11
    assert isinstance(task.generate(task.model(), "the flock", 5, temperature=0.0, seed=1), str)
    with one_line(TaskError, "the prompt ' ' has no token"):
        task.generate(task.model(), " ", 5, temperature=0.0, seed=1)
    with one_line(TaskError, "gives token 11, the model has 8"):
        task_of(text, tokenizer=str(tmp_path / "t"), model={**TINY, "vocab_size": 8})


def test_it_goes_on_with_a_text_of_bytes(text):
    task = task_of(text)
    model = task.model()
    first, second, other = (task.generate(model, "a bird", 8, 0.7, seed) for seed in (1, 1, 2))
    assert first == second != other


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"model": "nowhere"}, TaskError, "name a folder with config.json"),
        ({"model": {"model_type": "lama"}}, TaskError, "with model_type"),
        ({"model": {**TINY, "vocab_size": 99}}, TaskError, "has 256 tokens, the model 99"),
        ({"tokenizer": "nowhere"}, TaskError, "tokenizer 'nowhere'"),
        (
            {"context": 99, "model": GPT2},
            TaskError,
            "context is 99, and the model has 64 positions",
        ),
        ({"context": 10**6}, TextError, "too short"),
        ({"context": 0}, TaskError, "at least 1"),
        ({"context": "128k"}, TaskError, "context must be an integer"),
        ({"batch_size": 2.5}, TaskError, "batch_size must be an integer"),
        ({"text": 5}, TextError, "text must be a path"),
        ({"lora": {"rank": 2}}, TaskError, "lora: .*rank"),
    ],
)
def test_what_cannot_be_used_is_one_line(text, options, error, says):
    with one_line(error, says):
        task_of(text, **options).model()
