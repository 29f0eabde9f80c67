"""What `Swarm.state_dict` gives, on disk: tensors as safetensors, the rest as JSON; no pickles."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from worker.training import checkpoint

_TENSORS = ("anchor", "momentum", "residual")


def save_state(folder: Path, state: Mapping[str, Any]) -> Path:
    """Writes it below the folder, durable when this returns. Raises OSError."""
    tensors: dict[str, Tensor] = {}
    plain = []
    for index, fragment in enumerate(state["fragments"]):
        for key in _TENSORS:
            if fragment[key] is not None:
                tensors[f"{key}/{index}"] = fragment[key].contiguous()
        plain.append({key: value for key, value in fragment.items() if key not in _TENSORS})
    return checkpoint.save(folder, state["step"], tensors, {**state, "fragments": plain})


def load_state(folder: Path) -> dict[str, Any]:
    """The inverse. Raises CheckpointError: nothing below the folder is whole."""
    saved, _ = checkpoint.load(folder)
    by_kind = {key: saved.named(key) for key in _TENSORS}
    fragments = [
        {**plain, **{key: by_kind[key].get(str(index)) for key in _TENSORS}}
        for index, plain in enumerate(saved.values["fragments"])
    ]
    return {**saved.values, "fragments": fragments}
