"""TLS connections that come, break off in the middle of the handshake and go end no server.

The server is a process of its own: gRPC's core used to end it by SIGABRT or SIGSEGV.
"""

from pathlib import Path

from tests.support.connections import Server

THREADS, EACH = 16, 120  # 1,920 connections; half of them make a call


def test_a_server_lives_through_connections_that_break_off_in_their_handshake(
    tmp_path: Path,
) -> None:
    """While its certificate is renewed again and again, at moments that it does not choose."""
    server = Server(tmp_path, ["--renew-s", "1"])
    counts = server.connected(THREADS, lambda c: c.answered + c.failed + c.broken < EACH)
    code, said = server.end()
    assert code is None, f"ended with {code}: {said}"
    assert (counts.failed, counts.answered + counts.broken) == (0, THREADS * EACH)
    assert min(counts.answered, counts.broken) > THREADS * EACH / 3
