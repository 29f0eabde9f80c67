"""The outer state of a peer as plain values and tensors, and back: for its checkpoints, and for
those of a loop of one's own.

It goes with the local parameters of the same moment. With both, the inner optimizer's state and no
other peers, a run ends with the bits of one that was not interrupted.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from murmuration.algorithms.fragments import copy_values
from murmuration.protos.documents import first_difference
from murmuration.protos.figures import shown
from murmuration.worker.errors import CheckpointError
from murmuration.worker.exchange.allreduce.mean import Residuals
from murmuration.worker.manifest import Manifest
from murmuration.worker.training import checkpoint
from murmuration.worker.training.checkpoint import Checkpoint
from murmuration.worker.training.loop import Trainer, TrainingLoop

Views = Callable[[int, str, Tensor], Mapping[str, Tensor] | None]
"""By a fragment's index, and the key of one of its tensors."""

FORMAT = 10  # a state without one has the number of the protocol that it was written with
_REDUCTIONS = "reductions"
_BY_PARAMETER = ("anchor", "momentum")


def plain_state(
    loop: TrainingLoop, manifest: Manifest, ask: Callable[[Callable[[], Any]], Any], left: Residuals
) -> dict[str, Any]:
    """The step, the run's manifest, and all that is known of each fragment. train thread only.
    Args: ask: calls a function where rounds are reduced; left: what reductions have left out."""
    fragments = [each.plain() for each in loop.fragments]
    versions = [plain["version"] for plain in fragments]
    if left:
        found = ask(lambda: [left.plain(index, version) for index, version in enumerate(versions)])
        for plain, ranges in zip(fragments, found, strict=True):
            plain[_REDUCTIONS] = {f"{start}-{stop}": values for start, stop, values in ranges}
    held = {"manifest": manifest.plain(), "step": loop.step, "fragments": fragments}
    return {"format": FORMAT, **held}


def restore_state(
    loop: TrainingLoop, state: Mapping[str, Any], steps: int, left: Residuals
) -> None:
    """Puts back what `plain_state` gave, before a run of so many steps. train thread only."""
    loop.step = state["step"]
    prolonged = Manifest(state["manifest"]).steps != steps
    for index, (each, plain) in enumerate(zip(loop.fragments, state["fragments"], strict=True)):
        each.restore(plain)
        for place, values in plain.get(_REDUCTIONS, {}).items():
            start, stop = map(int, place.split("-"))
            left.load(index, each.state.version, [(start, stop, values)])
    if prolonged:
        loop.prolong()


def refusal(state: Mapping[str, Any], manifest: Manifest) -> str | None:
    """Says why a run, which may have become longer, cannot go on from a state; None: it can."""
    there = Manifest(state["manifest"])
    if (held := state.get("format", there.document["protocol"])) != FORMAT:
        return f"has format {held}, and this version reads {FORMAT}"
    different = first_difference(there.lasting, manifest.lasting, here="in it", there="asked for")
    flat = "fragments" in state  # a checkpoint has its tensors by name
    if different := different or (flat and manifest.other_order(there)) or None:
        return f"is of another run: {different}"
    if state["step"] > manifest.steps:
        return f"is of step {state['step']}, and run.steps is {manifest.steps}"
    return None


def packed(state: Mapping[str, Any]) -> dict[str, Any]:
    """The form in which torch.distributed.checkpoint loads a state: each of a run has the same
    keys, with tensors of the same shapes; the rest is in a tuple, which is one value there."""
    held = [{kind: each[kind] for kind in _BY_PARAMETER} for each in state["fragments"]]
    rest = [{k: v for k, v in e.items() if k not in _BY_PARAMETER} for e in state["fragments"]]
    return {"fragments": held, "rest": ({**state, "fragments": rest},)}


def unpacked(state: Mapping[str, Any]) -> dict[str, Any]:
    (rest,) = state["rest"]
    each = zip(state["fragments"], rest["fragments"], strict=True)
    return {**rest, "fragments": [{**held, **others} for held, others in each]}


def split(
    fragments: Iterable[Mapping[str, Any]], views: Views = lambda *_: None
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """(tensors by name, what else each fragment has). `views` cut up what is not kept whole."""
    tensors: dict[str, Tensor] = {}

    def rest(index: int, values: Mapping[str, Any], within: str) -> dict[str, Any]:
        plain: dict[str, Any] = {}
        for key, value in values.items():
            if isinstance(value, Mapping):
                plain[key] = rest(index, value, f"{within}{key}/")
            elif not isinstance(value, Tensor):
                plain[key] = value
            else:
                found = None if within else views(index, key, value)
                whole = {f"state/{index}/{within}{key}": value.contiguous()}
                tensors.update(whole if found is None else found)
        return plain

    return tensors, [rest(index, each, "") for index, each in enumerate(fragments)]


def joined(
    fragments: Iterable[Mapping[str, Any]], tensors: Mapping[str, Tensor]
) -> list[dict[str, Any]]:
    """Joins what was split, but for tensors that were not kept as a whole."""
    found: list[dict[str, Any]] = [copy.deepcopy(dict(each)) for each in fragments]
    for name, value in tensors.items():
        kind, *path = name.split("/")
        if kind == "state":
            at = found[int(path[0])]
            for key in path[1:-1]:
                at = at.setdefault(key, {})
            at[path[-1]] = value
    return found


def snapshot(
    trainer: Trainer, outer: Mapping[str, Any], stage: int | None = None, *, copied: bool = True
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Gives a checkpoint's tensors and its values. Args: outer: of the trainer, as `plain_state`
    gives it; stage: that it holds, None for all; copied: the tensors are independent of what
    training does next; else it does nothing more."""

    def views(index: int, kind: str, values: Tensor) -> Mapping[str, Tensor] | None:
        if kind not in _BY_PARAMETER:
            return None
        fragment = trainer.fragments[index].fragment
        named = fragment.named if kind == "anchor" else fragment.views
        found = named(values) if len(values) else {}  # a plan may have no momentum
        return {f"{kind}/{name}": each for name, each in found.items()}

    tensors, states = split(outer["fragments"], views)
    for each in trainer.fragments:
        tensors |= {f"local/{name}": values for name, values in each.held(copied=copied).items()}
    remembered, plain = trainer.replica.optimizer_state()
    for place, value in remembered.items():
        tensors[f"optimizer/{place}"] = value.to("cpu", copy=True) if copied else value.contiguous()
    values = {
        **{key: value for key, value in outer.items() if key != "fragments"},
        "position": trainer.replica.cursor.position,
        "stream": trainer.replica.cursor.stream,
        "stage": stage,
        "optimizer": plain,
        "buffers": [s.name for f in trainer.fragments for s in f.fragment.specs if s.averaged],
        "states": states,
    }
    return tensors, values


def restore_trainer(trainer: Trainer, saved: Checkpoint, steps: int, left: Residuals) -> None:
    """Puts a snapshot back. Args: steps, left: as of `restore_state`. Raises CheckpointError: it is
    whole, and no worker has saved it."""
    replica = trainer.replica
    try:
        fragments = joined(saved.values["states"], saved.tensors)
        for kind in _BY_PARAMETER:
            named = saved.named(kind)
            for each, values in zip(trainer.fragments, fragments, strict=True):
                if named.keys() >= {spec.name for spec in each.fragment.specs}:
                    values[kind] = each.fragment.flatten(named)
        restore_state(trainer, {**saved.values, "fragments": fragments}, steps, left)
        for name, local in replica.parameters.items():
            copy_values(local, saved.tensors[f"local/{name}"])
        remembered = {**saved.named("optimizer"), **saved.values["optimizer"]}
        replica.restore_optimizers(remembered, trainer.step)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"{saved.path}: is of no such run ({type(error).__name__}: {shown(str(error), 160)}); "
            "remove it to go on from the one before, or start from step 0 with --fresh"
        ) from error


def save_state(folder: Path, state: Mapping[str, Any]) -> Path:
    """Writes what `Swarm.state_dict` gives below the folder, durably. Raises OSError."""
    whole = unpacked(state)
    tensors, fragments = split(whole["fragments"])
    return checkpoint.save(folder, whole["step"], tensors, {**whole, "fragments": fragments})


def load_state(folder: Path) -> dict[str, Any]:
    """The inverse. Raises CheckpointError: nothing below the folder is whole."""
    saved, _ = checkpoint.load(folder)
    return packed({**saved.values, "fragments": joined(saved.values["fragments"], saved.tensors)})
