"""Serves the page of a swarm: what all peers say, asked as `murmur status --watch` does."""

import time

from coordinator import Failure
from coordinator.report.watch import Watch
from protos.exit_codes import ExitCode
from worker.views import PagePlace
from worker.views.history import Look
from worker.views.page import PageServer


def serve_page(place: PagePlace, watch: Watch, *, encrypted: bool) -> PageServer:
    """Serves until it is closed.

    Args:
        watch: the swarm; used on the server's thread.
        encrypted: whether `place.folder` has a certificate to speak HTTPS with off loopback.

    Raises:
        Failure: it cannot listen there.
    """

    def look() -> Look:
        try:
            first, _, answers = watch.ask_all()
        except Failure as error:
            raise TimeoutError(error.message) from error
        return Look(time.time(), first, answers)

    try:
        return PageServer(place, look, encrypted=encrypted)
    except OSError as error:
        raise Failure(str(error), ExitCode.ADDRESS_IN_USE) from error
