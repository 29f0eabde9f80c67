"""One run of ours: `murmur swarm` with its display in a file."""

from coordinator import Failure
from coordinator.launcher.launch import Launch
from protos.exit_codes import ExitCode
from tests.bench.compare.runs import Ended

_LOG = "swarm.log"
_WIDTH = 160
_INTERRUPTED = "interrupted"


def train(launch: Launch) -> Ended:
    """Trains to the end, or to a signal. Main thread only; never raises Failure."""
    from rich.console import Console

    from coordinator.launcher.swarm import run_swarm

    try:
        launch.out.mkdir(parents=True)
        with (launch.out / _LOG).open("w", encoding="utf-8") as log:
            code, report = run_swarm(launch, Console(file=log, width=_WIDTH, highlight=False))
    except Failure as failure:
        words = _INTERRUPTED if failure.exit_code > 128 else failure.message
        return Ended(problem=words, exit_code=failure.exit_code)
    except OSError as error:
        return Ended(problem=f"{launch.out}: {error.strerror}", exit_code=ExitCode.FAILED)
    if code == ExitCode.DONE:
        return Ended(report=report)
    problem = _INTERRUPTED if code > 128 else f"no worker came to the end; see {launch.out}"
    return Ended(problem=problem, exit_code=code)
