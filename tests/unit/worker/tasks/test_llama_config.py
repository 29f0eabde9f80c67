"""Sizes of the decoder: presets, and what does not fit."""

import pytest

from murmuration.worker.errors import TaskError
from murmuration.worker.tasks.llama_config import MODELS, llama_config


def test_presets_grow() -> None:
    sizes = [(config.num_hidden_layers, config.hidden_size) for config in MODELS.values()]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize(
    ("preset", "changes", "expected"),
    [
        ("tinny", {}, r"unknown model 'tinny'; did you mean 'tiny'\?"),
        ("tiny", {"hidden": 3}, r"no setting 'hidden'; did you mean 'hidden_size'"),
        ("tiny", {"hidden_size": 130, "num_attention_heads": 4}, "no multiple of num_attention"),
        ("tiny", {"hidden_size": 20, "num_attention_heads": 4}, "make that even"),
        ("base", {"num_key_value_heads": 5}, "no multiple of num_key_value_heads 5"),
        ("tiny", {"num_hidden_layers": 0}, "num_hidden_layers must be an integer above 0, got 0"),
        ("tiny", {"hidden_size": True}, "hidden_size must be an integer above 0, got True"),
        ("tiny", {"rope_theta": "big"}, "rope_theta must be a number above 0, got 'big'"),
        ("tiny", {"initializer_range": 0}, "initializer_range must be a number above 0, got 0"),
        ("tiny", {"hidden_size": None}, "hidden_size must be an integer above 0, got None"),
        ("tiny", {"tie_word_embeddings": 1}, "must be true or false, got 1"),
    ],
)
def test_sizes_that_do_not_fit_say_what_to_change(
    preset: str, changes: dict[str, object], expected: str
) -> None:
    with pytest.raises(TaskError, match=expected):
        llama_config(preset, **changes)
