"""Real workers behind links whose relay the test holds in its hands."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from murmuration.algorithms.link import parse_link
from murmuration.coordinator.processes import RelayProcess
from tests.support.workers import Swarm, running_swarm


@contextmanager
def relayed_swarm(
    count: int,
    out: Path,
    link: str,
    settings: Sequence[str],
    newcomers: Mapping[str, str] | None = None,
) -> Iterator[tuple[Swarm, RelayProcess]]:
    """A started swarm; every worker reaches the others over the relay only.

    Args:
        newcomers: HOST:PORT of workers by name that the test starts later, for their proxies.
    """
    with running_swarm(count, out, *settings) as swarm:
        addresses = {**swarm.addresses, **(newcomers or {})}
        members = {name: (address, parse_link(link)) for name, address in addresses.items()}
        with RelayProcess(members, log_path=out / "relay.log") as relay:
            for name in swarm.names:
                swarm.start(name, "--proxy", relay.proxies[name])
            yield swarm, relay
