"""Checkpoints: what was saved comes back, and damage of any kind leads to the one before."""

import json
import math
import os
import pickle
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
import xxhash

from murmuration.worker.config import load_config
from murmuration.worker.errors import CheckpointError
from murmuration.worker.manifest import Manifest
from murmuration.worker.tasks import TaskError
from murmuration.worker.training import checkpoint
from murmuration.worker.training.checkpoint import load, prune, save
from tests.support.full_disk import no_file_above

TENSORS = "tensors.safetensors"
MANIFEST = "manifest.json"


class Killed(BaseException):
    """The process ends here."""


def save_step(folder: Path, step: int) -> Path:
    tensors = {"anchor/0": torch.full((5,), float(step)), "empty": torch.empty(0)}
    return save(folder, step, tensors, {"step": step, "group": ["a", "b"]})


def step_of(folder: Path) -> int:
    """The step of the newest usable checkpoint, whose tensors must belong to it."""
    found, _ = load(folder)
    step: int = found.values["step"]
    assert found.tensors["anchor/0"].tolist() == [float(step)] * 5
    return step


@pytest.fixture
def two(tmp_path: Path) -> Path:
    save_step(tmp_path, 100)
    save_step(tmp_path, 200)
    return tmp_path


def newest(folder: Path, name: str) -> Path:
    return folder / "step-00000200" / name


def test_a_checkpoint_comes_back_as_it_was(tmp_path):
    tensors = {"anchor/0": torch.randn(3, 4), "scalar": torch.tensor(2.5)}
    tensors |= {"empty": torch.empty(0), "steps": torch.arange(3)}
    values = {"step": 7, "stream": "w\N{LATIN SMALL LETTER U WITH DIAERESIS}", "none": None}
    path = save(tmp_path / "new" / "folder", 7, tensors, values)
    found, problems = load(path.parent)
    assert problems == []
    assert found.path == path
    assert path.name == "step-00000007"
    assert set(found.tensors) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(found.tensors[name], tensor)
        assert found.tensors[name].dtype == tensor.dtype
    assert {key: found.values[key] for key in values} == values


@pytest.mark.parametrize(
    ("name", "says"), [(TENSORS, "cut short: {} of "), (MANIFEST, "unreadable: ")]
)
def test_a_file_cut_short_at_any_length_leads_to_the_one_before(two, name, says):
    whole = newest(two, name).read_bytes()
    for length in (*range(0, len(whole) - 1, 3), len(whole) - 1):
        newest(two, name).write_bytes(whole[:length])
        found, (problem,) = load(two)
        assert found.values["step"] == 100
        assert problem.startswith(f"{two / 'step-00000200'}: {says.format(length)}")
        assert problem.endswith("; going back to the one before")


@pytest.mark.parametrize("name", [TENSORS, MANIFEST])
def test_every_damaged_byte_leads_to_the_one_before_or_does_no_harm(two, name):
    """No harm is what changes no value of the manifest: a flipped digit of the step is damage."""
    whole, right = newest(two, name).read_bytes(), json.loads(newest(two, MANIFEST).read_bytes())
    damage = f"{two / 'step-00000200'}: damaged: its hash differs; going back to the one before"
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8 if name == TENSORS else 1
        newest(two, name).write_bytes(damaged)
        found, problems = load(two)
        if name == TENSORS:
            assert problems == [damage], position
        if found.path.name == "step-00000200":
            assert found.values == right, position
        else:
            assert found.values["step"] == 100, position


def test_a_garbled_manifest_leads_to_the_one_before(two):
    for garbage in (b"", b"[]", b"3", b"null", b'"x"', b"{}", b'{"tensors": 3}', b"\xff\xfe\x00"):
        newest(two, MANIFEST).write_bytes(garbage)
        found, problems = load(two)
        assert (found.values["step"], len(problems)) == (100, 1), garbage
    newest(two, MANIFEST).write_bytes(b"[" * 200_000)
    assert step_of(two) == 100


@pytest.mark.parametrize("name", [TENSORS, MANIFEST])
def test_a_missing_file_leads_to_the_one_before_and_a_pipe_is_not_waited_for(two, name):
    newest(two, name).unlink()
    assert step_of(two) == 100
    os.mkfifo(newest(two, name))
    assert step_of(two) == 100


def test_values_that_no_worker_saves_lead_to_the_one_before(two):
    """Though their hash is right."""
    numbers, no_numbers = torch.zeros(5), torch.tensor([1.0, math.nan])
    for step, (tensors, values) in enumerate(
        [
            ({"anchor/0": numbers}, {"step": "x"}),
            ({"anchor/0": numbers}, {"step": True}),
            ({"anchor/0": numbers}, {"step": 300, "stream": 3}),
            ({"anchor/0": numbers}, {"step": 300, "states": {}}),
            ({"anchor/0": no_numbers}, {"step": 300}),
            ({"local/0": no_numbers}, {"step": 300}),
        ]
    ):
        save(two, 300 + step, tensors, values)
        assert step_of(two) == 200, (values, tensors)
    buffers = {"anchor/0": torch.full((5,), 400.0), "local/0": no_numbers}  # of this peer alone
    save(two, 400, buffers, {"step": 400, "buffers": ["0"]})
    assert step_of(two) == 400


def test_a_pickle_in_place_of_the_tensors_is_never_executed(two, monkeypatch):
    """Even where size and hash are those of the pickle."""

    class Malicious:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(two / "executed"),)

    def write(path: Path, _tensors: object) -> dict[str, object]:
        path.write_bytes(content := pickle.dumps(Malicious()))
        return {"bytes": len(content), "xxh3_128": xxhash.xxh3_128_hexdigest(content)}

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_tensors", write)
        save_step(two, 300)
    found, (problem,) = load(two)
    assert found.values["step"] == 200
    assert problem.startswith(f"{two / 'step-00000300'}: unreadable: ")
    assert not (two / "executed").exists()


def test_when_none_is_usable_it_says_what_is_wrong_and_what_to_do(two):
    for path in two.glob("step-*"):
        (path / TENSORS).write_bytes(b"short")
    with pytest.raises(CheckpointError) as refused:
        load(two)
    line = str(refused.value)
    assert line.startswith(f"{two}: no usable checkpoint ({two / 'step-00000200'}: cut short: 5 of")
    assert line.endswith(" --fresh (murmur swarm: without --resume), or name another --out")


@contextmanager
def killed_at(monkeypatch: pytest.MonkeyPatch, moment: int) -> Iterator[None]:
    """Ends the process at one of the moments at which the disk is in another state."""
    moments = iter(range(100))

    def dying(work: object) -> object:
        def die_or_do(*args: object, **kwargs: object) -> object:
            if next(moments) == moment:
                raise Killed
            return work(*args, **kwargs)

        return die_or_do

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_tensors", dying(checkpoint.write_tensors))
        patch.setattr(os, "fsync", dying(os.fsync))
        for act in ("mkdir", "rename", "replace"):
            patch.setattr(Path, act, dying(getattr(Path, act)))
        yield


@pytest.mark.parametrize("moment", range(11))
def test_a_kill_at_any_point_leaves_the_newest_or_the_one_before(two, monkeypatch, moment):
    """A whole save has no more moments than that."""
    killed = nullcontext() if moment == 10 else pytest.raises(Killed)
    with killed_at(monkeypatch, moment), killed:
        save_step(two, 300)
    assert step_of(two) in (200, 300)
    save_step(two, 300)
    assert step_of(two) == 300
    names = [f"step-{step:08d}" for step in (100, 200, 300)]
    assert sorted(path.name for path in two.iterdir()) == names


def test_a_full_disk_is_an_os_error_and_the_earlier_checkpoints_stand(two):
    """A limit on the size of files stands in for the disk; the caller catches OSError."""
    with no_file_above(4096), pytest.raises(OSError, match="large"):
        save(two, 300, {"anchor/0": torch.zeros(10_000)}, {"step": 300})
    assert step_of(two) == 200
    assert list(two.glob(".partial*")) == []  # it would keep the disk full


def test_prune_keeps_the_newest(tmp_path):
    for step in (5, 40, 300, 2000, 10_000):
        save_step(tmp_path, step)
    prune(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00002000", "step-00010000"]
    prune(tmp_path, keep=2)
    assert step_of(tmp_path) == 10_000


def test_prune_leaves_what_is_saved_whatever_claims_to_be_later(two):
    for number in (99999998, 99999999):  # somebody else has filled the folder
        (two / f"step-{number}").mkdir()
    for name in ("step-00000050", "step-00000300", ".partial-00000001"):
        os.mkfifo(two / name)  # whoever opened it would wait
    for step in (300, 400):
        last = save_step(two, step)
        prune(two, 2, last=last)
    assert step_of(two) == 400
    assert {path.name for path in two.iterdir()} >= {"step-00000300", "step-00000400"}


def test_folders_of_other_names_are_neither_loaded_nor_counted_nor_removed(two):
    """A copy that somebody put aside must not cost the newest checkpoint."""
    for name in ("step-00000100.bak", "step-old", ".partial-00000300"):
        shutil.copytree(two / "step-00000100", two / name)
    assert step_of(two) == 200
    prune(two, keep=2)
    assert len(list(two.iterdir())) == 5


def test_the_stage_of_a_folder_is_that_of_its_newest_readable_manifest(tmp_path):
    assert checkpoint.held_stage(tmp_path / "missing") is None
    for step, stage in ((10, 1), (20, 2), (30, 3)):
        checkpoint.save(tmp_path, step, {}, {"stage": stage})
    assert checkpoint.held_stage(tmp_path) == 3
    manifest = tmp_path / "step-00000030" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"stage": 3', '"stage": 1'))
    assert checkpoint.held_stage(tmp_path) == 2
    (tmp_path / "step-00000020" / "tensors.safetensors").unlink()  # whoever resumes will see
    assert checkpoint.held_stage(tmp_path) == 2


def test_only_a_checkpoint_of_this_user_may_name_code_to_load(tmp_path, monkeypatch):
    manifest = Manifest.of(load_config(None, ["task.name=torch.hub:load"]), []).plain()
    values = {"step": 1, "manifest": manifest}
    path = checkpoint.save(tmp_path, 1, {}, values)
    assert checkpoint.config_of(checkpoint.load_one(path)).task.name == "torch.hub:load"

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another user's"))
    with pytest.raises(TaskError, match=r"only others have named it.* add --set task\.name="):
        checkpoint.config_of(checkpoint.load_one(path))
    typed = ["task.name=torch.hub:load"]
    assert checkpoint.config_of(checkpoint.load_one(path), typed).task.name == "torch.hub:load"

    key = tmp_path / "another user's/murmuration/checkpoint-key"
    assert key.stat().st_mode & 0o777 == 0o600
    (tmp_path / "a file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "a file"))
    unmarked = checkpoint.save(tmp_path, 2, {}, values)  # where no key can be, it is of nobody
    with pytest.raises(TaskError):
        checkpoint.config_of(checkpoint.load_one(unmarked))


def test_a_mark_belongs_to_the_settings_that_it_was_made_of(tmp_path):
    mine = Manifest.of(load_config(None, []), []).plain()
    mark = checkpoint.load_one(checkpoint.save(tmp_path, 1, {}, {"manifest": mine})).values["mark"]
    theirs = Manifest.of(load_config(None, ["task.name=torch.hub:load"]), []).plain()
    forged = checkpoint.Checkpoint(tmp_path, {}, {"manifest": theirs, "mark": mark})
    with pytest.raises(TaskError):
        checkpoint.config_of(forged)
