"""Fine-tuning by `kseed`: which runs are the same."""

from dataclasses import replace

from tests.lab.kseed import Run

RUN = Run("kseed", 1e-3, seed=0, steps=3, workers=2, init="runs/kseed-pretrained-400.safetensors")


def test_a_run_from_other_values_is_another_run() -> None:
    assert replace(RUN, init="runs/kseed-pretrained-1500.safetensors").key != RUN.key


def test_a_run_is_known_in_another_folder() -> None:
    assert replace(RUN, init="/elsewhere/kseed-pretrained-400.safetensors").key == RUN.key
