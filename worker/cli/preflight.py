"""`python -m murmuration.worker.cli.preflight`: what workers would refuse, before any is started.

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
from collections.abc import Iterable, Iterator, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from murmuration.worker.cli import exit_code_of
from murmuration.worker.config import Config, load_config, task_of, whose_task
from murmuration.worker.pipeline.part import Part, part_of
from murmuration.worker.tasks import BUILT_IN, task_factory
from murmuration.worker.training.checkpoint import held_stage


def preflight(request: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to a request. Raises what is no mistake of the user's."""
    path = Path(request["config"]) if request["config"] else None
    settings, flags = request["settings"], request["flags"]
    preset, config, configs = None, Config(), {}
    try:
        for preset in request["presets"]:
            config = configs[preset] = load_config(path, settings, preset, flags)
        preset = None  # the model is the same with any of them
        for part in _parts(config, configs.values()):
            for preset in configs:
                part.fragments(configs[preset])
            preset = None
    except Exception as error:
        code = exit_code_of(error)
        if code is None:
            raise
        return {"refused": " ".join(str(error).split()), "exit_code": code, "preset": preset}
    held = [held_stage(Path(folder) / "checkpoints") for folder in request["resume"]]
    return {"stages": config.stages.count, "held": held}


def _parts(config: Config, configs: Iterable[Config]) -> Iterator[Part]:
    """What workers would hold of the model, as far as something is to be tried with it.

    Built as they do, of a built-in task alone: one of the user's own is imported and its options
    are checked by name, but what its code does then is left to the workers.
    """
    if config.task.name not in BUILT_IN and ":" in config.task.name:
        with whose_task(config):
            task_factory(config.task.name, config.task.options)
        return
    task = task_of(config)
    if any(other.plan.fragments != 1 for other in configs):
        for stage in range(config.stages.count):
            yield part_of(task, config, stage)
    elif config.stages.count > 1:
        yield part_of(task, config, 0)


if __name__ == "__main__":
    with redirect_stdout(sys.stderr):  # a task's module may print
        answer = preflight(json.load(sys.stdin))
    json.dump(answer, sys.stdout)
