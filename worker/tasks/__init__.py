"""Tasks: what a swarm trains, behind three methods.

task.py         the interface: Task, Cursor, Batch, Staged; what can go wrong, in one line each
loading.py      from a name in the run's TOML to a task
text.py         text to learn from, with a part held out
llama.py        a Llama-style decoder under Hugging Face's parameter names, or one stage's part
llama_bytes.py  the default task: that decoder on the bytes of a text
huggingface.py  the task for a model of transformers, in full or by LoRA
"""

from murmuration.worker.errors import TaskError, TextError
from murmuration.worker.tasks.loading import (
    OWN_LOOP,
    import_factory,
    least_bytes,
    load_task,
    local_settings,
)
from murmuration.worker.tasks.task import (
    Batch,
    Cursor,
    ExportsToHuggingFace,
    Generates,
    Measures,
    OptimizesItself,
    SchedulesItself,
    SharesSamples,
    Staged,
    StageModule,
    Streams,
    Task,
    Warns,
    next_batch,
)
