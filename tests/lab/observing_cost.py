"""What it costs to be watched: the same small swarm with all of it off, and with all of it on.

    python -m tests.lab observing-cost [--workers 2] [--steps 600] [--turns 5]

On: mutual TLS with a run's certificates, `--metrics` and `--web` on every worker, a scrape of each
every five seconds and a browser's questions to each page every two. Off: none of it. Both take
turns, since machines are not equally fast all the time. Utilization is the share of the time from
first to last inner step that was computed, as a worker's result has it. CPU time is of the whole
process, its start included: it is told apart even where other work takes the cores.
"""

import argparse
import os
import statistics
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

from murmuration.protos.figures import percent
from murmuration.protos.identity import Authority, Role
from tests.support.workers import WorkerProcess, running_swarm, settings_of

_SCRAPE_S, _PAGE_S = 5.0, 2.0
_WATCHED = ("--metrics", "0", "--web", "0")


@dataclass(frozen=True)
class Run:
    """Means over the workers of one run; of the lag the worst."""

    utilization: float
    steps_per_s: float
    cpu_s: float
    lag_p99_ms: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--inner-steps", type=int, default=20)
    parser.add_argument("--turns", type=int, default=5)
    asked = parser.parse_args()
    runs: dict[str, list[Run]] = {"off": [], "on": []}
    for turn in range(asked.turns):
        # Who begins changes: what comes second finds files and caches as the first has left them.
        for arm in ("off", "on") if turn % 2 == 0 else ("on", "off"):
            runs[arm].append(train(asked.workers, asked.steps, asked.inner_steps, arm == "on"))
            print(f"turn {turn + 1}, {arm}: {words(runs[arm][-1])}", flush=True)
    middle = {arm: median_of(each) for arm, each in runs.items()}
    for arm, run in middle.items():
        print(f"{arm}, median of {asked.turns}: {words(run)}")
    less = 1 - middle["on"].steps_per_s / middle["off"].steps_per_s
    points = 100 * (middle["off"].utilization - middle["on"].utilization)
    more = middle["on"].cpu_s / middle["off"].cpu_s - 1
    print(
        f"on costs {percent(less)} of the steps a second, {points:.2f} points of utilization, "
        f"{percent(more)} more CPU"
    )


def words(run: Run) -> str:
    return (
        f"utilization {percent(run.utilization, 2)}, {run.steps_per_s:.2f} steps/s, "
        f"{run.cpu_s:.1f} s of CPU a worker, loop lag p99 {run.lag_p99_ms:.1f} ms"
    )


def median_of(runs: list[Run]) -> Run:
    return Run(
        statistics.median(run.utilization for run in runs),
        statistics.median(run.steps_per_s for run in runs),
        statistics.median(run.cpu_s for run in runs),
        statistics.median(run.lag_p99_ms for run in runs),
    )


def train(count: int, steps: int, inner_steps: int, watched: bool) -> Run:
    """One run of the swarm, from start to end."""
    settings = settings_of(run__steps=steps, diloco__inner_steps=inner_steps)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        if watched:
            certify(out, [f"w{index}" for index in range(count)])
        with running_swarm(count, out, *settings, "--threads", "1") as swarm:
            swarm.start_all(*(_WATCHED if watched else ()))
            urls = [
                each.wait_for(lambda e, kind=kind: e["event"] == kind, kind)["url"]
                for each in (swarm.workers.values() if watched else ())
                for kind in ("metrics", "page")
            ]
            with readers(urls):
                used_s = [cpu_s_at_the_end(each) for each in swarm.workers.values()]
                results = list(swarm.wait().values())
    return Run(
        statistics.fmean(each["compute_utilization"] for each in results),
        statistics.fmean(each["step"] / each["wall_s"] for each in results),
        statistics.fmean(used_s),
        max(each["loop_lag_ms"]["p99"] for each in results),
    )


def cpu_s_at_the_end(worker: WorkerProcess) -> float:
    """What its process has used when it has told its result."""
    while (
        worker.wait_for(lambda e: e["event"] in ("round", "result"), "result")["event"] == "round"
    ):
        pass
    stat = Path(f"/proc/{worker.of('listening')[0]['pid']}/stat").read_text()
    user, system = stat.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def certify(out: Path, names: list[str]) -> None:
    """Gives each worker its key and certificate, as `murmur swarm` does."""
    authority = Authority.make(out)
    for name in names:
        authority.new_identity(Role.PEER, name).save(out / name)


@contextmanager
def readers(urls: list[str]) -> Iterator[None]:
    """Whoever watches: each address is read again and again."""
    over = threading.Event()

    def read(url: str) -> None:
        page = not url.endswith("/metrics")
        while not over.wait(_PAGE_S if page else _SCRAPE_S):
            try:
                with urlopen(f"{url}api/swarm?since=0" if page else url, timeout=5) as answer:
                    answer.read()
            except OSError:
                return  # the worker has ended

    threads = [threading.Thread(target=read, args=[url], daemon=True) for url in urls]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main()
