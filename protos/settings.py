"""Options of commands that stand for a key of a run's TOML: the same in all commands."""

import json
from collections.abc import Mapping

FLAGS: Mapping[str, str] = {
    "run.steps": "--steps",
    "run.seed": "--seed",
    "diloco.inner_steps": "--inner-steps",
    "task.text": "--text",
    "task.model": "--model",
    "stages.count": "--stages",
    "stages.routing": "--routing",
    "stages.skip": "--skip",
}


def settings_of(options: object) -> dict[str, str]:
    """What was typed of `FLAGS`.

    Args:
        options: has each option as an attribute, None for one that was not typed; those of a
            command that has not all of them may be missing.

    Returns:
        The option as typed, by its setting, `section.key=value` with the value as TOML.
    """
    typed = {}
    for key, flag in FLAGS.items():
        value = getattr(options, flag.removeprefix("--").replace("-", "_"), None)
        if value is not None:
            typed[f"{key}={json.dumps(value, ensure_ascii=False)}"] = f"{flag} {value}"
    return typed
