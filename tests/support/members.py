"""Workers with certificates of their own, and a member among them that means harm."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from murmuration.worker.identity.authority import Authority
from murmuration.worker.identity.certificates import Identity, Role
from tests.support.workers import Swarm, WorkerProcess, free_addresses, running_swarm

COORDINATOR = "coordinator"  # among the processes of a swarm


@dataclass(frozen=True)
class Certificates:
    """The certificates that a swarm has to do with. Args:
    members: of the run, and mean harm.
    joiner: of the run, and honest.
    outsider: of an authority of its own, with the run's to check others by.
    tokens: that never enrolled.
    expelled: members once.
    namesake: a member that is called as the first token."""

    members: Sequence[Identity]
    joiner: Identity
    outsider: Identity
    tokens: Sequence[Identity]
    expelled: Sequence[Identity]
    namesake: Identity


Coordinated = tuple[Swarm, str, Certificates | None]
"""Workers, and the address of their coordinator."""


@contextmanager
def certified_swarm(
    count: int, out: Path, *settings: str, members: Sequence[str] = ()
) -> Iterator[tuple[Swarm, list[Identity]]]:
    """Workers of an encrypted run, not started yet, and certificates for more members of it."""
    authority = Authority.make(out / "authority")
    with running_swarm(count, out, *settings) as swarm:
        for name in swarm.names:
            authority.new_identity(Role.PEER, name).save(out / name)
        yield swarm, [authority.new_identity(Role.PEER, name) for name in members]


def resident_mib(swarm: Swarm, name: str = "w0") -> float:
    status = Path(f"/proc/{swarm.workers[name].process.pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024


@contextmanager
def coordinated_swarm(
    count: int, out: Path, *settings: str, encrypted: bool = True, staged: bool = False
) -> Iterator[Coordinated]:
    """Workers and a coordinator, started; its address, and certificates where all is encrypted.
    Args: staged: each serves a stage of its own, the last worker stage 0."""
    (address,) = free_addresses(1)
    certificates: Certificates | None = None
    with running_swarm(count, out, *settings) as swarm:
        if encrypted:
            authority = Authority.make(out / COORDINATOR)
            for name in swarm.names:
                authority.new_identity(Role.PEER, name).save(out / name)
            authority.new_identity(Role.COORDINATOR, COORDINATOR).save(out / COORDINATOR)
            first, *others = (
                authority.new_identity(Role.PEER, name)
                for name in (*(f"mallory{n}" for n in range(5)), "joiner")
            )
            foreign = Authority.make(out / "foreign").new_identity(Role.PEER, "mallory0")
            outsider = replace(foreign, authority=first.authority)
            tokens = [authority.create_token().identity for _ in range(4)]
            expelled = [authority.new_identity(Role.PEER, f"expelled{n}") for n in range(4)]
            for each in expelled:
                authority.expel(each.name)
            namesake = authority.new_identity(Role.PEER, tokens[0].name)
            certificates = Certificates(
                [first, *others[:-1]], others[-1], outsider, tokens, expelled, namesake
            )
        coordinator = WorkerProcess(
            ["coordinator", "--listen", address, "--out", str(out / COORDINATOR), "--json"],
            COORDINATOR,
        )
        swarm.workers[COORDINATOR] = coordinator
        coordinator.wait_for(lambda e: e["event"] == "listening", "address")
        for stage, name in enumerate(reversed(swarm.names)):
            serves = ("--stage", str(stage)) if staged else ()
            swarm.start(name, "--coordinator", address, *serves)
        yield swarm, address, certificates
