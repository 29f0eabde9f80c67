"""Workers with certificates of their own, and a member among them that means harm."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from protos.identity import Authority, Identity, Role
from tests.support.workers import Swarm, running_swarm


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
    """Of a worker's process."""
    status = Path(f"/proc/{swarm.workers[name].process.pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024
