"""Several ranks as one peer, over Gloo. One test starts them by torchrun."""

import json
import re

import pytest

from tests.support.fork_server import EXAMPLES, MURMUR
from tests.support.site_loop import loop_of, printed, python, site_of, two_sites
from tests.support.workers import PATIENCE_S, free_addresses, wait_until_listens

TORCHRUN = (*MURMUR[1:], "torchrun", "--nproc-per-node", "2", "--standalone")
SITE = str(EXAMPLES / "site.py")
SITES = [("noloco", "fsdp", 2), ("streaming", "tp", 4)]  # onebit and hsdp are below


def test_between_rounds_the_ranks_exchange_nothing():
    runs = (loop_of("diloco", "one", 1), loop_of("diloco", "ddp", 2))
    one, two = (json.loads(printed(*run)) for run in runs)
    assert two["met"] == [4, 8, 11]
    assert two["values"] == pytest.approx(one["values"], abs=1e-6)


@pytest.mark.parametrize(("preset", "kind", "ranks"), SITES)
def test_two_sites_are_equal_to_two_processes(preset, kind, ranks):
    one, two = two_sites(preset), two_sites(preset, kind, ranks)
    assert two[0] == two[1] == pytest.approx(one[0], abs=1e-6)


def test_a_checkpoint_of_torch_is_gone_on_from_by_any_number_of_ranks(tmp_path):
    """Each loop goes on from where the one before has ended, also while a round is on its way."""
    whole = json.loads(printed(*loop_of("onebit", "one", 1)))
    sites = [(2, "one", 1), (4, "fsdp", 2), (5, "hsdp", 4), (8, "fsdp", 1), (11, "one", 1)]
    load, ends = tuple[str, ...](), whole["hashes"][0]
    for step, kind, ranks in sites:
        save = ("--save", str(step), str(tmp_path / str(step)))
        found = json.loads(printed(*loop_of("onebit", kind, ranks, *load, *save)))
        assert found["hashes"][0] == ends
        load, ends = ("--load", save[-1]), found["hashes"][1]
    assert found["values"] == pytest.approx(whole["values"], abs=1e-6)


def test_a_site_and_a_process_train_one_model():
    (address,) = free_addresses(1)
    site = (SITE, "--name", "w0", "--listen", address, "--min-peers", "2")
    peers = [python(*TORCHRUN, *site)]
    wait_until_listens(address)
    peers.append(python(SITE, "--name", "w1", "--join", address))
    # Both ranks of torchrun write to one pipe: the end of a line may come after the other's.
    found = re.findall(r"(w\d): weights (-?\d+\.\d{9})", printed(*peers))
    assert sorted(name for name, _ in found) == ["w0", "w0", "w1"]
    assert len({weights for _, weights in found}) == 1


def test_what_rank_0_refuses_ends_all_ranks_with_one_line():
    for rank in site_of(2, SITE, "--join", "127.0.0.1:9", "--wait-s", "1"):
        assert "nobody answers: 127.0.0.1:9" in rank.communicate(timeout=PATIENCE_S)[1]
        assert rank.returncode != 0
