"""The links of a swarm on this machine: what `--link` says, and the proxy that makes them slow."""

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from murmuration.algorithms.link import Link, parse_link
from murmuration.protos.addresses import LOOPBACK_HOST

_NAMED = re.compile(r"(w\d+)=(.*)", re.DOTALL)


def parse_links(texts: Sequence[str], workers: int) -> dict[str, Link | None]:
    """The link of each worker, `w0`, `w1`, ...: its own, else the one without a name, else None.

    Args:
        texts: `20mbit,delay=50ms` for all others, `w0=5mbit` for one worker.

    Raises:
        ValueError: what is wrong, and how to write it.
    """
    names = [f"w{index}" for index in range(workers)]
    own: dict[str, Link] = {}
    common: Link | None = None
    for text in texts:
        named = _NAMED.fullmatch(text.strip())
        if named is None:
            if common is not None:
                raise ValueError(
                    f"link {text!r}: a second one for all; name a worker, as w0={text}"
                )
            common = parse_link(text)
            continue
        name, rest = named.groups()
        if name not in names:
            raise ValueError(f"link {text!r}: there is no {name}; workers are w0 to {names[-1]}")
        if name in own:
            raise ValueError(f"link {text!r}: a second one for {name}; leave one out")
        own[name] = parse_link(rest)
    return {name: own.get(name, common) for name in names}


@dataclass(frozen=True)
class Counters:
    """Bytes that one member has sent and received over its link."""

    sent_bytes: int
    received_bytes: int


_END_S = 5.0


class RelayProcess:
    """A running relay; ends with this process, however that one ends. Use from one thread.

    Args:
        members: (HOST:PORT that it listens on, its link or None) of each worker, by name.
        host: the address the proxies listen on, port free.
        seed: of jitter and of connections that break.
        log_path: takes what the relay writes to stderr.

    Raises:
        RuntimeError: it did not start.
    """

    proxies: dict[str, str]  # HOST:PORT for each worker's `--proxy`, by name

    def __init__(
        self,
        members: Mapping[str, tuple[str, Link | None]],
        *,
        host: str = LOOPBACK_HOST,
        seed: int = 0,
        log_path: Path | None = None,
    ) -> None:
        log = log_path.open("w") if log_path else None
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "murmuration.coordinator.shaping_proxy"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # the terminal's Ctrl-C is for the workers to save
            )
        finally:
            if log is not None:
                log.close()
        described = {
            name: (address, asdict(link) if link else None)
            for name, (address, link) in members.items()
        }
        options = {"host": host, "seed": seed, "members": described}
        try:
            self.proxies = self._ask(json.dumps(options))
        except BaseException:
            self.close()
            raise

    def counters(self) -> dict[str, Counters]:
        """What each worker has sent and received over the relay: TCP payload."""
        return {name: Counters(*counts) for name, counts in self._ask("")["bytes"].items()}

    def broken(self) -> int:
        """How many connections have been broken so far."""
        return int(self._ask("")["broken"])

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """Ends it; connections over it break."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> "RelayProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, line: str) -> dict[str, Any]:
        """Raises RuntimeError: it has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(OSError):
            print(line, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the relay has ended with exit code {self._process.wait()}")
        document: dict[str, Any] = json.loads(answer)
        return document
