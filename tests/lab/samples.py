"""How often each sample of an epoch is drawn by four peers with two joins, a leave and two kills.

    python -m tests.lab samples [--seeds 20]

Real nodes and trainers on the virtual clock; each seed has other moments and other victims. Fails
where a sample is never drawn, or more are drawn again than two crashes may repeat.
"""

import argparse
from collections.abc import Callable

from murmuration.worker.leases import SampleStream
from tests.protocol.drawn import Churn
from tests.protocol.virtual_time import run

SETTINGS: dict[str, Callable[[int], Churn]] = {
    "blocks of 20, batches of 4, 10 ms": lambda seed: Churn(seed),
    "the same, 230 ms": lambda seed: Churn(seed, delay_s=0.23),
    "blocks of 5, batches of 12, 10 ms": lambda seed: Churn(
        seed, stream=SampleStream(id=1, block=5, length=4003), batch=12
    ),
    "blocks of 7, batches of 3, 60 ms": lambda seed: Churn(
        seed, stream=SampleStream(id=1, block=7, length=4003), batch=3, delay_s=0.06
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20, help="of each setting")
    options = parser.parse_args()
    print(f"{'':36}  runs  samples  never     once  twice  more  most again  allowed")
    kept = True
    for name, churn_of in SETTINGS.items():
        churns = [churn_of(seed) for seed in range(options.seeds)]
        found = [run(churn.run()) for churn in churns]
        never, once, twice, more = (
            sum(getattr(each, field) for each in found)
            for field in ("never", "once", "twice", "more")
        )
        most_again, allowed = max(each.again for each in found), churns[0].most_again
        print(
            f"{name:36}  {len(found):4}  {never + once + twice + more:7}  {never:5}  {once:7}  "
            f"{twice:5}  {more:4}  {most_again:10}  {allowed:7}",
            flush=True,
        )
        kept = kept and never == 0 and most_again <= allowed
    return 0 if kept else 1


if __name__ == "__main__":
    raise SystemExit(main())
