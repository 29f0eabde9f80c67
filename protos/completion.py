"""What shells complete behind options: names that a newcomer does not know by heart.

They stand here and not where they are defined, since that would load torch at each press of a key.
"""

PRESETS = (
    "diloco",
    "streaming",
    "co2",
    "onebit",
    "sparse",
    "noloco",
    "streaming-noloco",
    "kseed",
    "ddp",
    "local",
)
CODECS = (
    "fp32",
    "bf16",
    "int8",
    "e3m0",
    "topk",
    "sign",
    "ternary",
    "topk32",
    "topk128",
    "topk256",
)
TRACKERS = ("tensorboard", "wandb", "trackio")
_SETTINGS = {
    "diloco.preset": PRESETS,
    "diloco.codec": CODECS,
    "diloco.reduction_codec": CODECS,
    "diloco.anchor_codec": CODECS,
    "diloco.inner_steps": (),
    "run.steps": (),
    "run.seed": (),
    "run.evaluate_every": (),
    "task.name": (),
    "task.text": (),
    "task.model": (),
    "inner.optimizer": ("auto", "adamw", "muon", "sgd"),
    "inner.lr": (),
}


def complete_preset(_context: object, _option: object, incomplete: str) -> list[str]:
    """As click asks: the presets that begin so."""
    return [name for name in PRESETS if name.startswith(incomplete)]


def complete_setting(_context: object, _option: object, incomplete: str) -> list[str]:
    """Of `--set`: common keys, and their values where those have names."""
    key, equals, value = incomplete.partition("=")
    if not equals:
        return [f"{name}=" for name in _SETTINGS if name.startswith(key)]
    return [f"{key}={name}" for name in _SETTINGS.get(key, ()) if name.startswith(value)]
