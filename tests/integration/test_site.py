"""Several ranks as one peer: DDP and FSDP2 over Gloo. One test starts them by torchrun."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.support.fork_server import EXAMPLES, ForkedPopen
from tests.support.workers import PATIENCE_S, free_addresses, wait_until_listens

TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d")
STANDALONE = ("--rdzv-endpoint", "127.0.0.1:0")
SITE = str(EXAMPLES / "site.py")


def python(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return ForkedPopen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )


def ranks(*arguments: str) -> list[subprocess.Popen[str]]:
    """Two, as torchrun starts them."""
    (address,) = free_addresses(1)
    host, port = address.split(":")
    shared = {"MASTER_ADDR": host, "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": port}
    return [
        python(*arguments, **shared, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2") for rank in "01"
    ]


def printed(*processes: subprocess.Popen[str]) -> str:
    try:
        said = [process.communicate(timeout=PATIENCE_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert {process.returncode for process in processes} == {0}, said
    return "".join(out for out, _ in said)


def test_two_ranks_are_equal_to_one_process() -> None:
    module = ("-m", "tests.support.site_loop", "11")
    runs = [[python(*module)], *(ranks(*module, kind) for kind in ("fsdp", "ddp"))]
    one, *two = (json.loads(printed(*run).splitlines()[-1]) for run in runs)
    assert [run["values"] for run in two] == [pytest.approx(one["values"], abs=1e-6)] * 2
    assert [run["met"] for run in two] == [[4, 8, 11]] * 2  # between rounds ranks exchange nothing


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_a_site_and_a_process_train_one_model(kind: str) -> None:
    (address,) = free_addresses(1)
    site = (SITE, "--shard", kind, "--name", "w0", "--listen", address, "--min-peers", "2")
    peers = [python(*TORCHRUN, *STANDALONE, *site)] if kind == "fsdp" else ranks(*site)
    wait_until_listens(address)
    peers.append(python(SITE, "--name", "w1", "--join", address))
    # Both ranks of torchrun write to one pipe: the end of a line may come after the other's.
    found = re.findall(r"(w\d): weights (-?\d+\.\d{9})", printed(*peers))
    assert sorted(name for name, _ in found) == ["w0", "w0", "w1"]
    assert len({weights for _, weights in found}) == 1


def test_what_rank_0_refuses_ends_all_ranks_with_one_line() -> None:
    for rank in ranks(SITE, "--join", "127.0.0.1:9", "--wait-s", "1"):
        _, errors = rank.communicate(timeout=PATIENCE_S)
        assert rank.returncode != 0
        assert errors.count("nobody answers: 127.0.0.1:9") >= 1
