"""TLS connections that come, ask or are broken off, and go: does the server that they reach live?

    python -m tests.lab connections [--runs 20] [--seconds 10] [--threads 16]
    python -m tests.lab connections --each-handshake      # as it was: one at each handshake
    python -m tests.lab connections --renew-s 2             # the certificate is renewed often
    python -m tests.lab connections --renew-s 0.001 --at-once     # ... amid handshakes

One server with the real transport, in a process of its own, which also computes; each run has a
new one. Half of the connections make a call with a member's certificate. The others are a
stranger's, which breaks off: at once, by a reset, in the middle of its first record of TLS, or when
the server has answered that.
Prints how many connections each run had, and how its server ended; fails if one did.
"""

import argparse
import signal
import tempfile
import time
from pathlib import Path

from tests.support.connections import Counts, Server, add_server_options, server_words


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each run")
    parser.add_argument("--threads", type=int, default=16, help="that connect")
    add_server_options(parser)
    options = parser.parse_args()
    ended = 0
    for number in range(1, options.runs + 1):
        with tempfile.TemporaryDirectory() as folder:
            counts, how = attacked(Path(folder), options, number)
        ended += how != "alive"
        found = f"{counts.answered} answered, {counts.failed} failed, {counts.broken} broken off"
        print(f"run {number}: {found}, {how}", flush=True)
    print(f"{ended} of {options.runs} servers ended")
    return 1 if ended else 0


def attacked(folder: Path, options: argparse.Namespace, seed: int) -> tuple[Counts, str]:
    """Connections that were answered, failed and broken off, and what became of the server."""
    server = Server(folder, server_words(options))
    until = time.monotonic() + options.seconds
    counts = server.connected(options.threads, lambda _: time.monotonic() < until, seed)
    code, errors = server.end()
    said = [line for line in errors.splitlines() if "Check failed" in line]
    how = "alive" if code is None else f"ended by {signal.Signals(-code).name}" if code < 0 else ""
    return counts, " ".join([how or f"ended with {code}", *said[:1]])


if __name__ == "__main__":
    raise SystemExit(main())
