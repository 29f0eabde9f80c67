"""Tasks: what a swarm trains, behind three methods.

task.py         the interface: Task, Cursor, Batch, Staged
loading.py      from a name in the run's TOML to a task
text.py         text to learn from, with a part held out
llama.py        a Llama-style decoder under Hugging Face's parameter names
llama_config.py its sizes, and presets
llama_stages.py the layers of that decoder that one stage of a pipeline holds
llama_bytes.py  the built-in task: that decoder on the bytes of a text
errors.py       what can go wrong, in one line each
"""

from worker.tasks.errors import TaskError, TextError
from worker.tasks.loading import BUILT_IN, load_task, task_factory
from worker.tasks.task import (
    SPLITS,
    Batch,
    Cursor,
    ExportsToHuggingFace,
    Generates,
    Staged,
    StageModule,
    Streams,
    Task,
    next_batch,
)

__all__ = [
    "BUILT_IN",
    "SPLITS",
    "Batch",
    "Cursor",
    "ExportsToHuggingFace",
    "Generates",
    "StageModule",
    "Staged",
    "Streams",
    "Task",
    "TaskError",
    "TextError",
    "load_task",
    "next_batch",
    "task_factory",
]
