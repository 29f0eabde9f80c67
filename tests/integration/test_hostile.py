"""What a peer may never do to another: a client on our own protos attacks real workers."""

import json
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import zstandard

from murmuration.coordinator.asking import ask
from murmuration.protos import murmuration_pb2 as pb
from tests.support.attacker import AT_THE_HANDSHAKE, aiming, attacked
from tests.support.attacks import ATTACKS, CONNECTIONS, more_files
from tests.support.attacks_on_rounds import foreign_manifest, join_through
from tests.support.attacks_on_stages import ON_STAGES, STAGES
from tests.support.members import Certificates, coordinated_swarm, resident_mib
from tests.support.stranger import Stranger, calling, handing_out, serving
from tests.support.workers import (
    PATIENCE_S,
    QUICK,
    SMALL,
    Swarm,
    running_swarm,
    settings_of,
)

INFECTED = """
from pathlib import Path
Path(__file__).with_name("it ran").touch()
def build(**options): raise ValueError("it ran")
"""


def test_a_joiner_loads_no_code_and_reads_no_file_on_a_peers_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "infected.py").write_text(INFECTED)
    monkeypatch.chdir(tmp_path)
    for number, setting in enumerate(
        ("task.name=infected:build", "inner.optimizer=infected:build", f"task.text={tmp_path}")
    ):
        out = tmp_path / f"out{number}"
        with serving({"Control/Join": handing_out(foreign_manifest(setting))}) as address:
            code, said = join_through(address, out, f"j{number}")
        assert (code, said.count("\n")) == (4, 1)
        assert f"only others have named it: if you trust it, add --set {setting}" in said
        assert not (tmp_path / "it ran").exists()
        assert not out.exists()


ENDLESS = [*SMALL, *QUICK, *settings_of(run__steps=1_000_000, diloco__inner_steps=5)]


@pytest.fixture(scope="module")
def attackable(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Swarm, str, Certificates | None]]:
    """Two workers and a coordinator of an encrypted run, for the attacks of the lab."""
    with coordinated_swarm(2, tmp_path_factory.mktemp("attackable"), *ENDLESS) as found:
        found[0].workers["w1"].wait_for_round(2)
        yield found


@pytest.mark.parametrize("who", ["stranger", "member"])
@pytest.mark.parametrize("name", ATTACKS | CONNECTIONS)
def test_no_attack_of_the_table_succeeds(
    attackable: tuple[Swarm, str, Certificates | None], name: str, who: str
) -> None:
    """A stranger is refused at the handshake. A member is refused, or believed what does no harm:
    each attack says itself what that is. Afterwards rounds of both go on."""
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
def attackable_stages(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Swarm, str, Certificates | None]]:
    """Two workers of a model in two stages; the first one serves stage 1."""
    out, often = tmp_path_factory.mktemp("stages"), settings_of(diloco__inner_steps=2)
    with coordinated_swarm(2, out, *ENDLESS, *STAGES, *often, staged=True) as found:
        found[0].workers["w0"].wait_for_round(2)
        yield found


@pytest.mark.parametrize("who", ["stranger", "member"])
@pytest.mark.parametrize("name", ON_STAGES)
def test_no_attack_on_a_stage_succeeds(
    attackable_stages: tuple[Swarm, str, Certificates | None], name: str, who: str
) -> None:
    """As above; microbatches of the others go on by way of the stage."""
    swarm, _, certificates = attackable_stages
    turn = list(ON_STAGES).index(name)
    stage = swarm.workers["w0"]

    def goes_on() -> None:
        stage.wait_for_round(max(event["round"] for event in stage.of("round")) + 3)

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
    status = ask(swarm.addresses["w1"], identity=certificates.members[0])
    counts = status["microbatches"]
    assert counts["dropped"] == counts["skipped"] == 0, counts
    assert [worker.process.poll() for worker in swarm.workers.values()] == [None, None, None]


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    """Two workers that all attacks of this file are for; none of them may end or fool one."""
    settings = [*ENDLESS, *settings_of(checkpoint__every_s=1)]
    with running_swarm(2, tmp_path_factory.mktemp("hostile"), *settings) as swarm:
        swarm.start_all()
        swarm.workers["w1"].wait_for_round(2)
        yield swarm


@pytest.fixture
def stranger(swarm: Swarm) -> Iterator[Stranger]:
    """Somebody who knows the first worker's address; afterwards rounds of two go on."""
    with calling(swarm.addresses["w0"]) as stranger:
        yield stranger
        wait_for_rounds_of_both(swarm)


def wait_for_rounds_of_both(swarm: Swarm) -> None:
    """More of them than are under way."""
    for name in swarm.names:
        worker = swarm.workers[name]
        (latest, *_) = (*reversed(worker.of("round")), {"round": 0})
        worker.wait_for(
            lambda e, after=latest["round"]: (
                e["event"] == "round" and e["round"] > after + 3 and e["contributors"] == 2
            ),
            "round of both",
        )


def test_what_a_few_bytes_unfold_to_is_refused_in_one_line(
    swarm: Swarm, stranger: Stranger
) -> None:
    before = resident_mib(swarm)
    plain = b"\x81\xa1x\xdd" + struct.pack(">I", 1_000_000) + b"\x90" * 1_000_000
    bomb = zstandard.ZstdCompressor().compress(plain)
    assert len(bomb) <= 128
    zeros = zstandard.ZstdCompressor().compress(bytes(256 << 20))
    for _ in range(50):
        for manifest in (bomb, zeros):
            said = stranger.refusal("Control/Join", pb.JoinRequest(manifest=manifest))
            assert "larger than" in said
            assert "\n" not in said
    large = pb.JoinRequest(member=pb.Member(peer="x", address="x", profile=b"x" * 1_000_000))
    large.manifest = stranger.manifest().pack()
    assert "takes at most 65536 bytes" in stranger.refusal("Control/Join", large)
    assert resident_mib(swarm) < before + 64


def test_a_name_of_three_megabytes_does_not_fill_the_log(swarm: Swarm, stranger: Stranger) -> None:
    run = stranger.manifest().run
    header = pb.ContributionHeader(run=run, sender="\x1b[2J" * 750_000, fragment=99)
    for _ in range(40):
        stranger.answers("Data/Exchange", pb.ExchangeUp(header=header))
    worker = swarm.workers["w0"]
    refused = worker.wait_for(
        lambda e: e["event"] == "refused" and e["times"] == 32, "the 32nd refusal"
    )
    assert len(json.dumps(refused)) < 1000
    told = [event for event in worker.of("refused") if event["sender"] == refused["sender"]]
    assert [event["times"] for event in told] == [1, 2, 4, 8, 16, 32]


def test_only_members_are_probed_for_others(swarm: Swarm, stranger: Stranger) -> None:
    with serving({"Control/Gossip": lambda _: b""}) as elsewhere:
        for peer, address in (
            ("x", elsewhere),
            ("x", "unix:/tmp/socket"),
            ("", ""),
            ("x" * 99, ""),
        ):
            asked = pb.ProbeRequest(peer=peer, address=address, timeout_s=float("nan"))
            said = stranger.refusal("Control/IndirectProbe", asked)
            assert said.endswith("is not a member")
            assert len(said) < 120
    # At the address that is known of it, whatever the stranger says; and not for ever.
    for timeout_s in (10.0, 1e300):
        asked = pb.ProbeRequest(peer="w1", address=elsewhere, timeout_s=timeout_s)
        answer = stranger.call("Control/IndirectProbe", asked, pb.ProbeReply)
        assert answer.alive or timeout_s > 10


def test_connections_that_say_nothing_are_closed_and_files_are_left(swarm: Swarm) -> None:
    """Nobody is kept out meanwhile, and checkpoints are written."""
    host, port = swarm.addresses["w0"].split(":")
    with more_files(4096), ExitStack() as stack:
        idle = [
            stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(1200)
        ]
        worker = swarm.workers["w0"]
        worker.wait_for(lambda e: e["event"] == "checkpoint", "a checkpoint")
        assert ask(swarm.addresses["w0"])["peer"] == "w0"
        for each in idle:
            each.settimeout(PATIENCE_S)
            with suppress(ConnectionResetError):
                while each.recv(1000):
                    pass
