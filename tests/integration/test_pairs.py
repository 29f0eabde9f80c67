"""Real workers in pairs, one of them killed."""

import signal
from pathlib import Path

from tests.support.gate import gate
from tests.support.workers import QUICK, SMALL, Hashes, running_swarm, settings_of

FAULTY = (
    *SMALL,
    *QUICK,
    *settings_of(run__steps=120, diloco__inner_steps=10, diloco__consensus="true"),
)


def test_survivors_of_a_killed_worker_go_on_and_agree(tmp_path: Path) -> None:
    held = gate(tmp_path, 45)
    with running_swarm(4, tmp_path, "--preset", "noloco", *FAULTY, *held.settings) as swarm:
        swarm.start_all()
        victim = swarm.workers["w2"]
        victim.wait_for_round(3)
        victim.send(signal.SIGKILL)
        assert victim.wait() == -signal.SIGKILL
        for name in ("w0", "w1", "w3"):
            swarm.workers[name].wait_for(
                lambda e: e["event"] == "member" and e["health"] == "dead", "a death"
            )
        with held.opened():
            results = swarm.wait("w0", "w1", "w3")
    assert {result["step"] for result in results.values()} == {120}
    assert len({Hashes.of(result) for result in results.values()}) == 1
    assert swarm.workers["w0"].of("round")[-1]["contributors"] == 3
