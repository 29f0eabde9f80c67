"""How soon a crash is noticed, and whether a live peer is ever declared dead.

    python -m tests.lab detection
    python -m tests.lab detection --seeds 30 --false-seeds 1000

Swarms of real membership machines with the default configuration, on a virtual clock. Messages take
5 to 50 ms. A crash is silence: nothing refuses a connection, as where a host loses its power.
"""

import argparse
import random
import statistics
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from murmuration.worker.membership import Health
from tests.unit.worker.membership.simulation import Simulation

_WARM_S = 5.0
_NOTICE_S = 20.0
_TOLD_AFTER = 50  # runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=30, help="of 100 peers, one of which crashes")
    parser.add_argument("--false-seeds", type=int, default=1000, help="of 50 peers and 1 %% loss")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    with ProcessPoolExecutor(options.processes) as pool:

        def over(run: Callable[[int], list[float]], seeds: int) -> list[float]:
            found: list[float] = []
            for done, values in enumerate(pool.map(run, range(seeds)), start=1):
                found += values
                if done % _TOLD_AFTER == 0:
                    print(f"  {done} of {seeds}, worst {max(found):.1f}", file=sys.stderr)
            return found

        for loss in (0.0, 0.01):
            tell_times(
                f"100 peers, {loss:.0%} loss", over(partial(crash, 100, loss), options.seeds)
            )
        tell_times("8 peers, 1% loss", over(partial(crash, 8, 0.01), options.seeds))
        few, some = max(1, options.false_seeds // 10), max(1, options.false_seeds // 20)
        tell_false("50 peers, 1% loss, 20 s", over(quiet, options.false_seeds), options.false_seeds)
        tell_false("50 peers, a partition for 30 s and its heal", over(healed, few), few)
        tell_false("50 peers, 5% loss, 5 of them stop again and again", over(starved, some), some)


def tell_times(name: str, noticed_s: Iterable[float]) -> None:
    centiles = statistics.quantiles(noticed_s, n=100, method="inclusive")
    print(f"{name}: noticed after p50 {centiles[49]:.1f} s, p99 {centiles[98]:.1f} s", flush=True)


def tell_false(name: str, deaths: list[float], seeds: int) -> None:
    print(f"{name}: {sum(deaths):.0f} live peers declared dead in {seeds} runs", flush=True)


def crash(peers: int, loss: float, seed: int) -> list[float]:
    """For each other peer, when it has noticed (s)."""
    swarm = Simulation(peers, seed, loss)
    at = _WARM_S + random.Random(seed).uniform(0, 1)
    swarm.run(at)
    swarm.crash("w0")
    swarm.run(_NOTICE_S)
    noticed = {change.observer: change.at - at for change in swarm.deaths() if change.peer == "w0"}
    return [noticed.get(name, float("inf")) for name in swarm.names[1:]]


def false_deaths(swarm: Simulation) -> int:
    """Peers that were declared dead; all are alive."""
    return len({change.peer for change in swarm.deaths()})


def quiet(seed: int) -> list[float]:
    swarm = Simulation(50, seed, loss=0.01)
    swarm.run(20)
    return [false_deaths(swarm)]


def healed(seed: int) -> list[float]:
    """Deaths after the heal, and views that still differ 60 s later."""
    swarm = Simulation(50, seed, loss=0.01)
    swarm.run(_WARM_S)
    names = swarm.names
    cut = random.Random(seed).randint(1, 25)
    swarm.partition(set(names[:cut]), set(names[cut:]))
    swarm.run(30)
    before = len(swarm.deaths())
    swarm.partition()
    swarm.run(60)
    agreed = swarm.views() == {tuple((name, Health.ALIVE) for name in sorted(names))}
    return [len(swarm.deaths()) - before + (0 if agreed else 1)]


def starved(seed: int) -> list[float]:
    """Five of fifty hold their process for 2 s and are free for 0.3 to 1.5 s, again and again."""
    swarm, rng = Simulation(50, seed, loss=0.05), random.Random(seed)
    swarm.run(_WARM_S)
    wakes = {name: swarm.now + rng.uniform(0, 1) for name in swarm.names[:5]}
    while swarm.now < _WARM_S + 20:
        name = min(wakes, key=wakes.__getitem__)
        swarm.run(max(0.0, wakes[name] - swarm.now))
        swarm.pause(name, 2.0)
        wakes[name] = swarm.now + 2.0 + rng.uniform(0.3, 1.5)
    return [false_deaths(swarm)]


if __name__ == "__main__":
    main()
