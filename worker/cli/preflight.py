"""`python -m worker.cli.preflight`: what workers would refuse, said before any is started.

Reads a request on stdin and writes an answer to stdout, both JSON objects:

    config, settings, flags     as `load_config` takes them
    presets                     each is tried; null: that of the config
    resume                      folders of workers to go on with

    stages                      into how many the model is cut
    held                        the stage of which each of those has a checkpoint, or null
    refused, exit_code, preset  instead: the line for the user, its exit code, and which preset
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from worker.checkpoint import held_stage
from worker.cli import exit_code_of
from worker.config import Config, load_config
from worker.stages.part import part_of
from worker.tasks import BUILT_IN, load_task


def preflight(request: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to a request. Raises what is no mistake of the user's."""
    path = Path(request["config"]) if request["config"] else None
    preset, config = None, Config()
    try:
        for preset in request["presets"]:
            config = load_config(path, request["settings"], preset, request["flags"])
        preset = None  # the rest is the same with any of them
        _try_task(config)
    except Exception as error:
        code = exit_code_of(error)
        if code is None:
            raise
        return {"refused": " ".join(str(error).split()), "exit_code": code, "preset": preset}
    held = [held_stage(Path(folder) / "checkpoints") for folder in request["resume"]]
    return {"stages": config.stages.count, "held": held}


def _try_task(config: Config) -> None:
    """Builds a built-in task as workers do; a user's own is left to them: its code may do
    anything."""
    if config.task.name not in BUILT_IN and ":" in config.task.name:
        return
    task = load_task(config.task.name, seed=config.run.seed, options=config.task.options)
    if config.stages.count > 1:
        part_of(task, config, 0)


if __name__ == "__main__":
    json.dump(preflight(json.load(sys.stdin)), sys.stdout)
