"""The harm that no peer may do to another: a client on our own protos attacks real workers."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import grpc
import pytest

from murmuration.coordinator.asking import ask
from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker.transport import CONTROL_METHODS, Method
from tests.support.attacker import AT_THE_HANDSHAKE, aiming, attacked
from tests.support.attacks import ATTACKS, CONNECTIONS
from tests.support.attacks_on_rounds import foreign_manifest, join_through
from tests.support.attacks_on_stages import ON_STAGES, STAGES
from tests.support.members import Coordinated, coordinated_swarm, resident_mib
from tests.support.stranger import calling, handing_out, serving
from tests.support.workers import ENDLESS, QUICK, Swarm, settings_of

INFECTED = """
from pathlib import Path
Path(__file__).with_name("it ran").touch()
def build(**options): raise ValueError("it ran")
"""


def test_a_joiner_loads_no_code_for_a_peer(tmp_path, monkeypatch):
    """Nor does it read a file: the attacks of the table name one."""
    (tmp_path / "infected.py").write_text(INFECTED)
    monkeypatch.chdir(tmp_path)
    setting, out = "task.name=infected:build", tmp_path / "out"
    with serving({"Control/Join": handing_out(foreign_manifest(setting))}) as address:
        code, said = join_through(address, out, "joiner")
    assert (code, said.count("\n")) == (4, 1)
    assert f"only others have named it: if you trust it, add --set {setting}" in said
    assert not (tmp_path / "it ran").exists()
    assert not out.exists()


@pytest.fixture(scope="module")
def begins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Coordinated]]:
    """Makes a swarm of two workers and a coordinator. The one before ends, for it takes a third of
    a core: tests of one swarm stand together."""
    with ExitStack() as up:

        def begin(first: str, *settings: str, **more: bool) -> Coordinated:
            up.close()
            used = (tmp_path_factory.mktemp("attacked"), *ENDLESS, *QUICK, *settings)
            found = up.enter_context(coordinated_swarm(2, *used, **more))
            found[0].workers[first].wait_for_round(2)
            return found

        yield begin


@pytest.fixture(scope="module")
def attackable(begins: Callable[..., Coordinated]) -> Coordinated:
    """An encrypted run, for the attacks of the lab."""
    return begins("w1")


@pytest.mark.parametrize(
    ("name", "who"),
    [
        *((name, "member") for name in ATTACKS | CONNECTIONS),
        *((name, "stranger") for name in [*list(ATTACKS)[::9], *CONNECTIONS]),
    ],
)
def test_no_attack_of_the_table_succeeds(attackable, name, who):
    """A stranger is refused at the handshake, whatever it wants. A member is refused, or believed
    what does no harm: each attack says itself what that is. Afterwards rounds of both go on."""
    swarm, turn = attackable[0], [*ATTACKS, *CONNECTIONS].index(name)

    def times() -> Iterator[None]:
        yield
        if who == "member":  # again, when the workers have had time to act on it
            wait_for_rounds_of_both(swarm)
            yield

    with aiming(*attackable, stranger=who == "stranger", turn=turn) as target:
        outcome = attacked(target, (ATTACKS | CONNECTIONS)[name], times())
        if name in ATTACKS:
            assert (outcome == AT_THE_HANDSHAKE) == (who == "stranger"), outcome
        wait_for_rounds_of_both(swarm)
        assert target.adopted() == []
    assert [worker.process.poll() for worker in swarm.workers.values()] == [None, None, None]


@pytest.fixture(scope="module")
def attackable_stages(begins: Callable[..., Coordinated]) -> Coordinated:
    """A model in two stages; the first worker serves stage 1. Each microbatch has its pause."""
    return begins("w0", *STAGES, *settings_of(task__pause_s=0.05), staged=True)


@pytest.mark.parametrize(
    ("name", "who"),
    [*((name, "member") for name in ON_STAGES), (next(iter(ON_STAGES)), "stranger")],
)
def test_no_attack_on_a_stage_succeeds(attackable_stages, name, who):
    """As above; microbatches of the others go on by way of the stage."""
    swarm, _, certificates = attackable_stages
    turn, stage = list(ON_STAGES).index(name), swarm.workers["w0"]

    def goes_on() -> None:
        stage.wait_for_round(max(event["round"] for event in stage.of("round")) + 2)

    def times() -> Iterator[None]:
        yield
        if who == "member":
            goes_on()
            yield

    with aiming(*attackable_stages, stranger=who == "stranger", turn=turn) as target:
        outcome = attacked(target, ON_STAGES[name], times())
        assert (outcome == AT_THE_HANDSHAKE) == (who == "stranger"), outcome
        goes_on()
    assert certificates is not None
    counts = ask(swarm.addresses["w1"], identity=certificates.members[0])["microbatches"]
    assert counts["dropped"] == counts["skipped"] == 0, counts
    assert [worker.process.poll() for worker in swarm.workers.values()] == [None, None, None]


def wait_for_rounds_of_both(swarm: Swarm) -> None:
    """Waits for a round that has begun since."""
    for name in swarm.names:
        worker = swarm.workers[name]
        (latest, *_) = (*reversed(worker.of("round")), {"round": 0})
        worker.wait_for(
            lambda e, after=latest["round"]: (
                e["event"] == "round" and e["round"] > after + 1 and e["contributors"] == 2
            ),
            "round of both",
        )


@pytest.fixture(scope="module")
def open_swarm(begins: Callable[..., Coordinated]) -> Coordinated:
    """A run that is not encrypted."""
    return begins("w1", encrypted=False)


@pytest.mark.parametrize("name", ["128 bytes of a million lists", "a name of 3 MB"])
def test_without_certificates_nobody_is_fooled_or_ended(open_swarm, name):
    swarm = open_swarm[0]
    before = resident_mib(swarm)
    with aiming(*open_swarm) as target:
        attacked(target, ATTACKS[name], range(2))
        wait_for_rounds_of_both(swarm)
        assert target.adopted() == []
        assert target.longest_event < 1000
    assert resident_mib(swarm) < before + 64
    assert [worker.process.poll() for worker in swarm.workers.values()] == [None, None, None]


@pytest.mark.parametrize(
    "garbage",
    [b"", b"\xff" * 100, b"\x0a\xff\xff\xff\xff\x0f", b"cos\nsystem\n(S'x'\ntR."],
    ids=["nothing", "no field", "a length without end", "a pickle"],
)
def test_bytes_that_are_no_message_end_nobody(open_swarm, garbage):
    """Given to every method."""
    swarm = open_swarm[0]
    with calling(swarm.addresses["w0"]) as stranger:
        for method in CONTROL_METHODS:
            with suppress(grpc.RpcError):  # some are answered: an empty message may ask a status
                stranger.call(method, garbage, pb.StatusReply)
        for method in (each for each in Method if each.startswith("Data/")):
            with suppress(grpc.RpcError):
                list(stranger.stream(method, [garbage]))
    wait_for_rounds_of_both(swarm)
    assert [worker.process.poll() for worker in swarm.workers.values()] == [None, None, None]
