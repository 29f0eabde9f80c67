"""Several ranks as one peer: DDP and FSDP2 by torchrun, over Gloo."""

import json
import re
import subprocess
import sys

import pytest

from tests.integration.test_examples import EXAMPLES
from tests.support.workers import PATIENCE_S, free_addresses, wait_until_listens

TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d")
STANDALONE = ("--rdzv-endpoint", "127.0.0.1:0")


def python(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def printed(process: subprocess.Popen[str]) -> str:
    try:
        out, errors = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    return out


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_two_ranks_are_equal_to_one_process(kind: str) -> None:
    module = ("-m", "tests.support.site_loop", "11")
    runs = [python(*module), python(*TORCHRUN, *STANDALONE, *module, kind)]
    one, two = (json.loads(printed(run).splitlines()[-1]) for run in runs)
    assert two == pytest.approx(one, abs=1e-6)


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_a_site_and_a_process_train_one_model(kind: str) -> None:
    (address,) = free_addresses(1)
    script = str(EXAMPLES / "site.py")
    site = (script, "--shard", kind, "--name", "w0", "--listen", address, "--min-peers", "2")
    peers = [python(*TORCHRUN, *STANDALONE, *site)]
    wait_until_listens(address)
    peers.append(python(script, "--name", "w1", "--join", address))
    # Both ranks write to one pipe: the end of a line may come after the other's.
    found = re.findall(r"(w\d): weights (-?\d+\.\d{9})", "".join(printed(peer) for peer in peers))
    assert sorted(name for name, _ in found) == ["w0", "w0", "w1"]
    assert len({weights for _, weights in found}) == 1


def test_what_rank_0_refuses_ends_all_ranks_with_one_line() -> None:
    script = str(EXAMPLES / "site.py")
    site = python(*TORCHRUN, *STANDALONE, script, "--join", "127.0.0.1:9", "--wait-s", "1")
    _, errors = site.communicate(timeout=PATIENCE_S)
    assert site.returncode != 0
    assert errors.count("nobody answers: 127.0.0.1:9") >= 2
