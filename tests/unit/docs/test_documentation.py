"""The examples of the documentation work as they stand there."""

import inspect
import re
import tomllib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import click
import pytest

from murmuration import Swarm
from murmuration.protos.exit_codes import ExitCode
from murmuration.protos.files import LOG_BYTES
from murmuration.worker.catchup.bootstrap import DESERTED_S
from murmuration.worker.cli import cli
from murmuration.worker.config import parse_config
from murmuration.worker.identity.authority import MOST
from murmuration.worker.library.share import LEAST_BLOCKS, MOST_SAMPLES
from murmuration.worker.library.site import SiteRank
from murmuration.worker.node.answers import MOST_TUNNELS, TUNNELS_EACH
from murmuration.worker.relay.choice import TRY_S
from murmuration.worker.relay.service import PLACES, RATE_MBPS, SILENT_S
from murmuration.worker.tasks import Cursor, load_task
from murmuration.worker.training.evaluation import validate
from murmuration.worker.training.loop import AWAIT_OTHERS_S
from murmuration.worker.training.optimizers import InnerConfig
from murmuration.worker.training.replica import InnerReplica
from tests.support import programs_table

ROOT = Path(__file__).resolve().parents[3]


def block(page: str, language: str, of: str = "") -> str:
    """The first piece of code in that language, or the first that holds `of`."""
    found = re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    return next(text for text in found if of in text)


def test_the_toml_example_is_the_defaults():
    document = tomllib.loads(block("docs/configuration.md", "toml"))
    shown = parse_config(document, "docs/configuration.md")
    assert shown == parse_config({"task": document["task"]}, "defaults")


def test_the_task_example_learns(tmp_path, monkeypatch):
    (tmp_path / "documented_task.py").write_text(block("README.md", "python", of="class Tones"))
    monkeypatch.syspath_prepend(str(tmp_path))
    task = load_task("documented_task:Tones", seed=1, options={})
    model, steps = task.model(), 300
    cursor = Cursor(seed=1, stream="w0")
    first, second = islice(task.batches("train", cursor), 2)
    assert (second.inputs == next(task.batches("train", first.cursor)).inputs).all()
    before = validate(task, model, seed=1)
    inner = InnerReplica(task, model, InnerConfig(), cursor, steps)
    for step in range(1, steps + 1):
        inner.inner_step(step, inner.backward(step))
    after = validate(task, model, seed=1)
    assert after.loss < 0.2 < 1.9 < before.loss
    assert after.metrics["accuracy"] > 0.95 > 0.25 > before.metrics["accuracy"]


def test_the_table_of_programs_is_what_its_tests_say():
    _, held, _ = programs_table.parts(programs_table.PAGE.read_text())
    assert held == programs_table.table(), "python -m tests.support.programs_table writes it anew"


def commands(command: click.Command) -> Iterator[click.Command]:
    """A command and all that are below it."""
    yield command
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            yield from commands(command.get_command(click.Context(command), name))


def test_a_first_sentence_stands_without_the_name_above_it():
    """It begins with a verb or an article, in help and docstrings. Each option has a help text."""
    named = [named for each in commands(cli) for named in (each, *each.params)]
    assert [each for each in named if isinstance(each, click.Option) and not each.help] == []
    texts = [text for each in named if (text := getattr(each, "help", None))]
    nameless = r"(?:Of|What|Whether|That|With)\b"
    unclear = re.compile(rf"{nameless}|(To|Where|Which|As|At|In|From|By|On)\b|[a-z]")
    assert [text for text in texts if unclear.match(text)] == []
    for path in ROOT.glob("[acdmptw]*/**/*.py"):
        found = re.findall(rf'^ *r?"""{nameless}.*', path.read_text(), re.MULTILINE)
        assert found == [], path


def test_every_option_that_a_page_names_is_one():
    code = re.findall(r"`([^`\n]+)`", (ROOT / "docs/commands.md").read_text())
    named = set(re.findall(r"(?<!\S)--[a-z][a-z-]+", " ".join(code))) - {"--help"}
    assert len(named) > 20
    options = {name for each in commands(cli) for option in each.params for name in option.opts}
    assert named - options == set()


def test_every_test_that_a_page_names_is_there():
    for page in ("docs/library.md", "docs/commands.md"):
        for path in re.findall(r"`(tests/[^`]*)`", (ROOT / page).read_text()):
            assert (ROOT / path).exists(), path


def test_the_exit_codes_of_the_page_are_all():
    table = (ROOT / "docs/commands.md").read_text().partition("| code | meaning |")[2]
    rows = re.findall(r"^\| (\d+) \|", table.partition("\n\n")[0], re.MULTILINE)
    assert [int(code) for code in rows] == [*ExitCode]
    assert cli.help is not None
    told = re.findall(r"\b(\d+) (?=[a-z])", cli.help.partition("Exit codes:")[2])
    assert [int(code) for code in told] == [*ExitCode]


def test_what_a_swarm_offers_and_takes_is_there():
    page = (ROOT / "docs/library.md").read_text()
    named = set(re.findall(r"swarm\.([a-z_]+)", page))
    assert {"shard", "done", "catch_up", "anchor", "report", "metrics", "state_dict"} <= named
    assert [name for kind in (Swarm, SiteRank) for name in named if not hasattr(kind, name)] == []
    arguments = re.findall(r"`(web|no_relay|relay_mbps|progress|out|settings|steps)=", page)
    assert len(set(arguments)) == 7
    assert set(arguments) <= set(inspect.signature(Swarm.__init__).parameters)


@pytest.mark.parametrize(
    ("page", "says"),
    [
        ("library", f"at most {AWAIT_OTHERS_S:g} s"),
        ("library", f"1/{LEAST_BLOCKS} of the epoch, at most {MOST_SAMPLES} samples"),
        ("commands", f"it waits {DESERTED_S:g} s for one of them"),
        ("commands", f"within {SILENT_S:g} s if it falls silent"),
        ("commands", f"each of its relays every {TRY_S:g} s"),
        ("commands", f"At {LOG_BYTES >> 20} MiB a log"),
        ("commands", f"at most {RATE_MBPS:g} Mbit/s for all together"),
        ("commands", f"for at most {PLACES} peers"),
        ("commands", f"{TUNNELS_EACH} streams of tunnels there, and all peers {MOST_TUNNELS}"),
        ("security", f"up to\n{MOST}"),
    ],
)
def test_a_figure_of_a_page_is_that_of_the_code(page, says):
    assert " ".join(says.split()) in " ".join((ROOT / f"docs/{page}.md").read_text().split())


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_link_of_a_page_leads_somewhere():
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")):
        for target in re.findall(r"\]\((?![a-z]+:)([^)\s]+)\)", page.read_text()):
            path, _, anchor = target.partition("#")
            there = page.parent / path if path else page
            assert there.exists(), (page, target)
            assert not anchor or anchor in anchors(there), (page, target)


def test_what_a_user_reads_is_short():
    pages = [page.read_text() for page in (ROOT / "README.md", *ROOT.glob("docs/*.md"))]
    words = re.sub(r"```.*?```", "", "\n".join(pages), flags=re.DOTALL).split()
    assert len(pages[0].splitlines()) <= 120
    assert sum(bool(re.search(r"\w", word)) for word in words) <= 12_000
