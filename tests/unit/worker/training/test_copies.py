"""Copies of checkpoints: a worker on an empty disk goes on from the newest that is whole."""

import os
from pathlib import Path

import fsspec
import pytest
import torch

from murmuration.worker.config import CheckpointConfig
from murmuration.worker.errors import CheckpointError, ConfigError
from murmuration.worker.training import checkpoint
from murmuration.worker.training.checkpoint import load, save
from murmuration.worker.training.saving import NotCopied, RemoteCopies, Saver


@pytest.fixture(params=["file://", "memory://", *os.environ.get("MURMUR_STORES", "").split()])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointConfig:
    """The settings for copies on a disk, and in a store that knows no folders. The variable
    MURMUR_STORES names others to try, such as s3://bucket."""
    return CheckpointConfig(copy_to=f"{request.param}{tmp_path}/there", copy_every_s=0.0)


def begun(config: CheckpointConfig, folder: Path, *, fresh: bool = False) -> RemoteCopies:
    copies = RemoteCopies.begun(config, folder, fresh=fresh)
    assert copies is not None
    return copies


def save_step(folder: Path, step: int) -> Path:
    return save(folder, step, {"anchor/0": torch.full((5,), float(step))}, {"step": step})


def copied(config: CheckpointConfig, folder: Path, *steps: int) -> None:
    copies = begun(config, folder)
    for step in steps:
        copies.put(save_step(folder, step))


def test_an_empty_disk_gets_the_newest_copy_and_one_with_checkpoints_keeps_its_own(
    config, tmp_path
):
    copied(config, tmp_path / "a", 1, 2, 3)
    begun(config, tmp_path / "b")
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["step-00000003"]
    found, problems = load(tmp_path / "b")
    assert (found.values["step"], found.tensors["anchor/0"].tolist()) == (3, [3.0] * 5)
    assert problems == []
    files, root = fsspec.url_to_fs(config.copy_to)
    there = {name.rsplit("/", 1)[-1] for name in files.ls(root, detail=False)}
    assert there == {"writer", "step-00000002", "step-00000003"}  # `keep` is two
    save_step(tmp_path / "c", 2)
    begun(config, tmp_path / "c")
    assert load(tmp_path / "c")[0].values["step"] == 2


@pytest.mark.parametrize("file", [checkpoint.MANIFEST, "tensors.safetensors"])
@pytest.mark.parametrize("there", [b"", None], ids=["cut", "missing"])
def test_a_copy_that_is_not_whole_leads_to_the_one_before(config, tmp_path, file, there):
    copied(config, tmp_path / "a", 1, 2)
    files, root = fsspec.url_to_fs(config.copy_to)
    for step, expected in ((2, 1), (1, None)):
        files.rm(f"{root}/step-{step:08d}/{file}")
        if there is not None:
            files.pipe_file(f"{root}/step-{step:08d}/{file}", there)
        if expected is None:
            with pytest.raises(CheckpointError, match="no checkpoint that is whole; name another"):
                begun(config, tmp_path / "c")
        else:
            damaged, fetched = begun(config, tmp_path / "b").to_tell
            assert "step-00000002: " in damaged
            assert "step-00000001 was fetched" in fetched
            assert load(tmp_path / "b")[0].values["step"] == expected


def test_of_two_workers_at_one_place_the_later_one_copies_and_a_fresh_run_does_not_mix_with_it(
    config, tmp_path
):
    first = begun(config, tmp_path / "a", fresh=True)
    begun(config, tmp_path / "b").put(save_step(tmp_path / "b", 1))
    with pytest.raises(NotCopied, match="another worker copies there now"):
        first.put(save_step(tmp_path / "a", 2))
    with pytest.raises(CheckpointError, match="step-00000001 of an earlier run; name another"):
        begun(config, tmp_path / "a", fresh=True)


def test_a_place_that_nothing_writes_to_is_refused_in_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"^checkpoint.copy_to = 'nowhere://x': .*nowhere.*$"):
        begun(CheckpointConfig(copy_to="nowhere://x"), tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"^checkpoint.copy_to = .*file.*$"):
        begun(CheckpointConfig(copy_to=f"{tmp_path}/file/below"), tmp_path / "out")


@pytest.mark.parametrize("every_s", [0.0, 1e9])
def test_the_saver_copies_as_often_as_asked_and_the_last_one(config, tmp_path, every_s):
    config = CheckpointConfig(copy_to=config.copy_to, copy_every_s=every_s, keep=9)
    told: list[dict[str, object]] = []
    copies = begun(config, tmp_path / "a")
    saver = Saver(tmp_path / "a", config, 0, told.append, lambda _: None, copies)
    for step in range(1, 5):
        saver.begin(step, lambda: ({"anchor/0": torch.zeros(1)}, {})).result()
        if saver._copying is not None:
            saver._copying.result()
    saver.close()
    assert [event["event"] for event in told] == ["checkpoint"] * 4
    files, root = fsspec.url_to_fs(config.copy_to)
    steps = sorted(name[-1] for name in files.ls(root, detail=False) if "step-" in name)
    assert steps == (["1", "2", "3", "4"] if not every_s else ["1", "4"])
    begun(config, tmp_path / "b")  # another takes the place
    saver = Saver(tmp_path / "a", config, 0, told.append, lambda _: None, copies)
    saver.begin(5, lambda: ({"anchor/0": torch.zeros(1)}, {})).result()
    saver.close()
    warnings = [str(event["text"]) for event in told if event["event"] == "warning"]
    assert all("step-00000005 is not copied" in text for text in warnings)
    assert warnings
