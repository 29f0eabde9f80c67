"""Other systems: when they are left out, and how their end is told."""

import os
import signal
import threading
from pathlib import Path

import pytest

from algorithms.link import Link
from tests.lab.compare import runs
from tests.lab.compare.options import Bench
from tests.lab.compare.runs import Ended

LINK = Link(rate_mbps=20)


def asked(root: Path, **changes: object) -> Bench:
    return Bench(**{"out": root / "out", "root": root, "systems": ("torchft",), **changes})


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a script that does as the file `does` in it says; namespaces are to be had."""
    script = tmp_path / "tests/lab/peers/run.py"
    script.parent.mkdir(parents=True)
    script.write_text("import sys\nfrom pathlib import Path\nexec(Path('does').read_text())\n")
    python = tmp_path / ".venv-peers/bin/python"
    python.parent.mkdir(parents=True)
    python.touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(runs, "_no_namespaces", lambda: None)
    return tmp_path


def train(checkout: Path, does: str, **changes: object) -> Ended:
    (checkout / "does").write_text(does)
    folder = checkout / "out/20mbit/torchft"
    return runs.train_baseline("torchft", asked(checkout, **changes), LINK, folder, 40, 20)


def test_reasons_to_leave_one_out(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def why(
        link: Link = LINK, steps: int = 40, name: str = "torchft", **changes: object
    ) -> str | None:
        return runs.why_skipped(name, asked(checkout, **changes), link, steps)

    assert why() is None
    assert why(settings=("diloco.codec=int8", "exchange.x=1")) is None
    assert "not task.model=small" in str(why(settings=("task.model=small",)))
    assert "a rate and nothing else" in str(why(Link(rate_mbps=20, delay_s=0.1)))
    assert "less than a round" in str(why(steps=0))
    assert "not the relay" in str(why(link_means="relay"))
    monkeypatch.setattr(runs, "_no_namespaces", lambda: "this needs root")
    assert why() == "skipped: no network namespaces: this needs root"
    (checkout / ".venv-peers/bin/python").unlink()
    assert why() == "not installed (make bench-peers)"
    assert why(name="torch-ddp") == "skipped: no network namespaces: this needs root"


def test_its_report_is_read_and_its_interface_kept_to(checkout: Path) -> None:
    ended = train(
        checkout,
        "import json\n"
        "at = sys.argv.index('--json') + 1\n"
        "Path(sys.argv[at]).write_text(json.dumps({'argv': sys.argv[1:]}))",
        workers=3,
        seed=5,
    )
    assert ended.report is not None
    words = " ".join(ended.report["argv"])
    assert words.startswith(
        "torchft --workers 3 --steps 40 --inner-steps 20 --seed 5 --mbps 20 --logs "
    )


def test_a_failure_is_one_line(checkout: Path) -> None:
    ended = train(
        checkout, "sys.exit('w0 has ended early\\n  w0: Traceback\\n  w0: OSError: no route')"
    )
    assert (ended.report, ended.exit_code) == (None, 1)
    assert ended.problem == "failed: w0 has ended early: w0: OSError: no route"
    assert "Traceback" in (checkout / "out/20mbit/torchft/run.log").read_text()


def test_success_without_a_report_is_a_failure(checkout: Path) -> None:
    assert "no report" in str(train(checkout, "pass").problem)


def test_one_that_takes_for_ever_is_ended(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "_START_S", 0.0)
    ended = train(checkout, "import signal\nsignal.pause()", limit_s=0.5)
    assert (ended.problem, ended.exit_code) == ("failed: took more than 2 s", 1)


def test_ctrl_c_is_passed_on(checkout: Path) -> None:
    """The script gets the time to tidy up after itself."""

    def press() -> None:
        (checkout / "up").open().close()  # returns when the script has opened it too
        os.kill(os.getpid(), signal.SIGINT)

    os.mkfifo(checkout / "up")
    presser = threading.Thread(target=press)
    presser.start()
    before = signal.getsignal(signal.SIGINT)
    try:
        ended = train(
            checkout,
            "import signal\n"
            "try:\n"
            "    Path('up').open('w').close()\n"
            "    signal.pause()\n"
            "finally:\n"
            "    Path('tidied').touch()",
        )
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, before if number == signal.SIGINT else signal.SIG_DFL)
    presser.join()
    assert (ended.interrupted, ended.exit_code, ended.problem) == (True, 130, "interrupted")
    assert (checkout / "tidied").exists()


def test_the_reason_is_short() -> None:
    assert runs.reason([]) == ""
    assert runs.reason(["missing: `make bench-peers`"]) == "missing: `make bench-peers`"
    assert len(runs.reason(["x" * 500])) == 160
