"""The section [stages]: what is refused, and what routes keep to."""

import pytest

from murmuration.worker.config import load_config, parse_config, to_document
from murmuration.worker.errors import ConfigError
from murmuration.worker.pipeline.stages_config import StagesConfig


def test_what_cannot_be_is_refused():
    for settings, reason in [
        ({"count": 0}, "count is 0"),
        ({"count": 3, "layers": (3, 2)}, r"layers is \[3, 2\], of 2 stages, but count is 3"),
        ({"layers": (3, 2)}, r"layers is \[3, 2\], of 2 stages, but count is 1"),
        ({"count": 2, "layers": (3, 0)}, r"layers is \[3, 0\]; each stage has a whole number of"),
        ({"count": 2, "layers": (3, 1.5)}, r"layers is \[3, 1.5\]; each stage has a whole number"),
        ({"count": 2, "layers": (3, True)}, r"layers is \[3, True\]; each stage has a whole"),
        ({"count": 2, "routing": "skp"}, "use one of full"),
        ({"count": 2, "activations": "fp8"}, "use one of bf16"),
        ({"count": 2, "microbatches": 0}, "microbatches must be at least 1"),
        ({"count": 2, "memory_mib": 0.0}, "memory_mib > 0"),
        ({"count": 4, "routing": "random", "skip": 1.0}, "skip is 1.0"),
        ({"count": 4, "routing": "full", "skip": 0.25}, "leave out skip"),
        ({"count": 4, "routing": "stochastic", "skip": 0.25}, "leave out skip"),
        ({"count": 12, "routing": "skip", "skip": 0.8}, "do not reach stage 11"),
        ({"count": 4, "routing": "skip", "skip": 0.9}, "at most 2: set skip to 0.50 or less"),
        ({"count": 2, "routing": "skip", "skip": 0.5}, "it can leave out none: leave skip out"),
    ]:
        with pytest.raises(ValueError, match=reason):
            StagesConfig(**settings)


def test_every_so_many_iterations_no_stage_is_skipped():
    config = StagesConfig(count=4, routing="skip", skip=0.25, full_every=3)
    assert [config.rules(i).visited for i in range(1, 8)] == [3, 3, 4, 3, 3, 4, 3]


def test_layers_are_a_list_in_toml():
    config = load_config(None, ["stages.count=3", "stages.layers=[3, 1, 2]"])
    assert config.stages == StagesConfig(count=3, layers=(3, 1, 2))
    assert parse_config(to_document(config), "there") == config
    for value, said in (("3", "3; it must be of type list"), ("3,1", "'3,1'; it must be of type")):
        with pytest.raises(ConfigError, match=said):
            load_config(None, ["stages.count=3", f"stages.layers={value}"])
