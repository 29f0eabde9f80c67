"""What `Swarm.state_dict` gives, on disk: tensors as safetensors, the rest as JSON; no pickles."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from murmuration.worker.training import checkpoint
from murmuration.worker.training.outer_state import joined, split


def save_state(folder: Path, state: Mapping[str, Any]) -> Path:
    """Writes it below the folder, durable when this returns. Raises OSError."""
    tensors, fragments = split(state["fragments"])
    return checkpoint.save(folder, state["step"], tensors, {**state, "fragments": fragments})


def load_state(folder: Path) -> dict[str, Any]:
    """The inverse. Raises CheckpointError: nothing below the folder is whole."""
    saved, _ = checkpoint.load(folder)
    return {**saved.values, "fragments": joined(saved.values["fragments"], saved.tensors)}
