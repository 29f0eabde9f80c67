"""Processes beside a loop in a swarm: the workers of loaders, and whatever else is forked
there."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import murmuration
from murmuration.worker.tasks import Batch, Cursor
from murmuration.worker.training import loop
from tests.support import fork_server
from tests.support.peers import Peer, peers, row, run
from tests.support.workers import running_swarm, settings_of

STEPS, H = 10, 5
ROUNDS = STEPS // H
ONES = torch.ones(2, 4)
BY_FORK = multiprocessing.get_context("fork")
SHARED = "workers are forked as without a swarm: nothing to change"


class Numbers(Dataset[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        self.scaled = lambda index: torch.full((4,), index / 32)  # cannot be pickled

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.scaled(index), "labels": torch.ones(1)}


class Line(torch.nn.Linear):
    """Learns them, with Hugging Face's trainer too."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:  # type: ignore[override]  # HF's
        return {"loss": (super().forward(x) - labels).square().mean()}


@contextmanager
def training(peer: Peer) -> Iterator[tuple[murmuration.Swarm, Callable[..., None]]]:
    """The swarm, and a function that takes a step."""
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor = ONES, labels: torch.Tensor = ONES[:, :1]) -> None:
        model(x, labels)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()

    with murmuration.Swarm(model, optimizer, inner_steps=H, steps=STEPS, **peer.arguments) as swarm:
        torch.manual_seed(peer.index)
        yield swarm, step


def _loader(**more: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(), batch_size=8, shuffle=True, num_workers=2, **more)


def shared_samples(peer: Peer) -> object:
    loader = _loader()
    with training(peer) as (swarm, step):
        while not swarm.done:
            for batch in swarm.shard(loader):
                step(**batch)
                if swarm.done:
                    break
    return swarm.metrics["rounds_completed"]


def hugging_face(peer: Peer) -> object:
    import transformers

    arguments = transformers.TrainingArguments(
        output_dir=str(peer.out),
        max_steps=STEPS,
        data_seed=peer.index,
        per_device_train_batch_size=8,
        dataloader_num_workers=2,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    callback = murmuration.hf.SwarmCallback(inner_steps=H, **peer.arguments)
    trainer = transformers.Trainer(Line(), arguments, train_dataset=Numbers(), callbacks=[callback])
    with redirect_stdout(sys.stderr):
        trainer.train()
    return callback.swarm and callback.swarm.metrics["rounds_completed"]


def a_pool(peer: Peer) -> object:
    with training(peer) as (swarm, step):
        while not swarm.done:
            with BY_FORK.Pool(2) as pool:
                assert pool.map(abs, [-1, -2]) == [1, 2]
            for _ in range(H):
                step()
    return swarm.metrics["rounds_completed"]


def a_process_that_leaves_the_block(peer: Peer) -> object:
    with training(peer) as (swarm, step):
        while not swarm.done:
            step()
            if swarm.step == H:
                if (pid := os.fork()) == 0:
                    break
                assert os.waitpid(pid, 0)[1] == 0
    if not swarm.done:
        os._exit(0)
    return swarm.metrics["rounds_completed"]


@pytest.mark.parametrize(
    "program", [shared_samples, hugging_face, a_pool, a_process_that_leaves_the_block]
)
@row("`num_workers` of a plain loop, `swarm.shard`, a trainer; pools", "shared", SHARED)
def test_processes_fork_beside_a_swarm(tmp_path, program):
    outcomes = run(tmp_path, program, program)
    assert [each.value for each in outcomes] == [ROUNDS, ROUNDS], outcomes
    assert [each.code for each in outcomes] == [0, 0]


def forks_and_goes_on(peer: Peer) -> None:
    with training(peer):
        if os.fork() == 0:
            signal.alarm(30)
            peer.tell("forked")
            for fd in (1, 2):
                os.close(fd)
        signal.pause()


@row("a killed peer whose loader workers still live", "shared", "its port is free at once")
def test_what_is_forked_keeps_no_port(tmp_path):
    with peers(tmp_path, forks_and_goes_on) as found:
        process = found.start(0)
        process.wait_for(lambda event: event["event"] == "forked", "fork")
        process.send(signal.SIGKILL)
        process.wait()
        host, port = found.address.split(":")
        socket.create_server((host, int(port))).close()


class Loaded:
    """A task whose samples are loaded by workers."""

    def __init__(self, *, seed: int) -> None:
        self._seed = seed

    def model(self) -> torch.nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(self._seed)
            return torch.nn.Linear(4, 1)

    def loader(self) -> DataLoader[Any]:
        pairs = TensorDataset(torch.arange(128.0).view(32, 4) / 128, torch.ones(32, 1))
        return DataLoader(pairs, batch_size=8, shuffle=True, num_workers=2)

    def batches(self, split: str, cursor: Cursor) -> Iterator[Batch]:
        while True:
            for inputs, targets in self.loader():
                cursor = cursor.advance(len(targets))
                yield Batch(inputs, targets, cursor)

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        found: torch.Tensor = (model(batch.inputs) - batch.targets).square().mean()
        return found


@row("`num_workers` in a task's loader", "shared", "as in a loop")
def test_workers_of_a_tasks_loader_are_forked(tmp_path):
    settings = settings_of(
        task__name=f'"{Loaded.__module__}:{Loaded.__name__}"',
        task__data='"leased"',
        run__steps=STEPS,
        diloco__inner_steps=H,
    )
    with running_swarm(2, tmp_path, *settings) as swarm:
        swarm.start_all()
        results = swarm.wait()
    assert [each["rounds_completed"] for each in results.values()] == [ROUNDS, ROUNDS]


def a_step_elsewhere(peer: Peer) -> object:
    with training(peer) as (swarm, step):
        said, here = BY_FORK.Pipe()
        if os.fork() == 0:
            for act in (step, lambda: swarm.shard([1]), swarm.state_dict):
                try:
                    act()
                except murmuration.UsageError as error:
                    here.send(str(error))
            os._exit(0)
        refusals = {said.recv() for _ in range(3)}
        while not swarm.done:
            step()
    return sorted(refusals)


@row("steps or `swarm.shard` in a process forked within the block", "refused", "only its parent's")
def test_a_forked_process_is_no_peer(tmp_path):
    first, second = run(tmp_path, a_step_elsewhere, a_step_elsewhere)
    (refusal,) = first.value
    assert "this process was forked within the block of a Swarm" in refusal
    assert second.value == first.value


_WITHOUT_GUARD = """
import torch, murmuration
model = torch.nn.Linear(1, 1)
with murmuration.Swarm(model, torch.optim.SGD(model.parameters(), lr=0.1)) as swarm:
    data = torch.utils.data.TensorDataset(torch.ones(8, 1))
    loader = torch.utils.data.DataLoader(data, num_workers=1, multiprocessing_context="spawn")
    print(len(list(swarm.shard(loader))))
"""


@row("workers that are spawned, in a script without a main guard", "refused", "a line says how")
def test_a_script_without_a_guard_is_told_so(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(_WITHOUT_GUARD)
    done = fork_server.run([sys.executable, str(script)])
    assert done.returncode == 1
    assert 'put the script under if __name__ == "__main__":' in done.stderr


def grpc_that_came_first(peer: Peer) -> None:
    loop.FORKS_CRASH = True  # as `protos` finds it then
    with training(peer):
        pass


@row("`import grpc` before `import murmuration`", "told", "forked processes may crash")
def test_grpc_that_was_imported_first_is_told(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "GRPC_ENABLE_FORK_SUPPORT"}
    ours = "murmuration.protos"
    for first, crash in (("grpc", "True"), ("os", "False")):
        found = [sys.executable, "-c", f"import {first}, {ours} as ours; print(ours.FORKS_CRASH)"]
        assert subprocess.check_output(found, text=True, env=environment).strip() == crash
    (outcome,) = run(tmp_path, grpc_that_came_first)
    assert "WARNING murmuration: warning: grpc was imported before" in outcome.log
