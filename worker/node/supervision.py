"""A worker and the machine around it: notices that it will go away, systemd, and limits.

Notices and systemd have threads of their own.
"""

import ctypes
import os
import signal
import socket
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urlsplit

_POLL_S = 1.0
_ANSWER_S = 2.0
_MAX_BYTES = 1024
_NOT_YET = frozenset({"", "0", "false", "none", "no"})
# Of Google's metadata, which answers nobody without it; others pass it over.
_HEADERS = {"Metadata-Flavor": "Google"}
# Amazon's wants a token first.
_TOKEN_PATH = "/latest/api/token"
_TOKEN_ASKED, _TOKEN_GIVEN = "X-aws-ec2-metadata-token-ttl-seconds", "X-aws-ec2-metadata-token"
_OPEN_FILES = 16_384
_FEW_FILES = 256
_LEAST_BYTES = 1_200_000_000  # of addresses, of which torch's libraries take most
_M_MMAP_THRESHOLD = -3  # glibc's malloc.h
_LARGE_BYTES = 8 << 20
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def is_noticed(source: str) -> bool:
    """Tells whether the file exists; or the URL answers 200 with anything but nothing, 0, false, no
    or none. Blocks for seconds at most."""
    with suppress(OSError, ValueError, HTTPException):  # no answer, no URL, no HTTP
        if not source.startswith(("http://", "https://")):
            return Path(source).exists()
        try:
            return _says_so(_read(source, _HEADERS))
        except urllib.error.HTTPError as error:
            error.close()
            if error.code != 401:
                return False
        place = urlsplit(source)
        where = f"{place.scheme}://{place.netloc}{_TOKEN_PATH}"
        token = _read(where, {_TOKEN_ASKED: "60"}, method="PUT")
        return _says_so(_read(source, {_TOKEN_GIVEN: token}))
    return False


def _says_so(answer: str) -> bool:
    return answer.strip().lower() not in _NOT_YET


def _read(url: str, headers: dict[str, str], method: str = "GET") -> str:
    request = urllib.request.Request(url, headers=headers, method=method)
    with _DIRECT.open(request, timeout=_ANSWER_S) as answer:
        text: bytes = answer.read(_MAX_BYTES)
    return text.decode(errors="replace")


def end_on_sigterm() -> None:
    """Has SIGTERM end this process with 0: there is nothing to save yet. main thread only."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))


def leaving_on(source: str | None, leave: Callable[[], None]) -> AbstractContextManager[None]:
    """Within the block `leave` is called, once and from another thread, when a notice comes."""
    if source is None:
        return nullcontext()

    def look() -> bool:
        if noticed := is_noticed(source):
            leave()
        return noticed

    return _repeated("murmur-notice", look, _POLL_S)


class Systemd:
    """The service manager that started this process, if the environment names one (NOTIFY_SOCKET,
    WATCHDOG_USEC). Ref: sd_notify(3)."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        path = environment.get("NOTIFY_SOCKET", "")
        self._address = f"\0{path[1:]}" if path.startswith("@") else path
        usec = environment.get("WATCHDOG_USEC", "")
        own = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self.watchdog_s = int(usec) / 1e6 if usec.isdigit() and own and self._address else 0.0

    def tell(self, *lines: str) -> None:
        if not self._address:
            return
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto("\n".join(lines).encode(), self._address)

    def watched(self, answers: Callable[[], object]) -> AbstractContextManager[None]:
        """Within the block feeds the watchdog, if any, while the peer answers. Args: answers:
        raises RuntimeError or TimeoutError if it is not well."""

        def feed() -> bool:
            with suppress(RuntimeError, TimeoutError):
                answers()
                self.tell("WATCHDOG=1")
            return False

        every_s = self.watchdog_s / 3
        return _repeated("murmur-watchdog", feed, every_s) if every_s else nullcontext()


@contextmanager
def _repeated(name: str, work: Callable[[], bool], every_s: float) -> Iterator[None]:
    ended = threading.Event()

    def run() -> None:
        while not ended.is_set() and not work():
            ended.wait(every_s)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_ANSWER_S)


def allow_open_files() -> int | None:
    """Allows this process as many as the user may have, and returns how many; None: there is no
    limit. Each peer takes two connections, and shells give a process few."""
    try:
        import resource
    except ImportError:
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    wanted = _OPEN_FILES if hard == unlimited else min(_OPEN_FILES, hard)
    if soft != unlimited and soft < wanted:
        with suppress(OSError, ValueError):  # a sandbox may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return wanted
    return None if soft == unlimited else soft


def few_open_files(allowed: int | None) -> str | None:
    if allowed is None or allowed >= _FEW_FILES:
        return None
    return (
        f"open files: at most {allowed} here, and each peer takes up to four; allow 1024 with "
        "`ulimit -n 1024`, or LimitNOFILE= in a systemd unit"
    )


def check_memory() -> None:
    """Raises MemoryError: loading torch takes more, and may end the process without a word."""
    if (free := _free_of_process_bytes()) is not None and free < _LEAST_BYTES:
        raise MemoryError


def memory_bytes() -> int | None:
    """The memory that machine, control group and user still leave this process, on Linux."""
    found = [_free_of_process_bytes()]
    with suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found += [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                folder = Path("/sys/fs/cgroup") / line.removeprefix("0::/")
                most = int((folder / "memory.max").read_text())  # "max" is none
                found.append(most - int((folder / "memory.current").read_text()))
    return min((each for each in found if each is not None), default=None)


def _free_of_process_bytes() -> int | None:
    with suppress(ImportError, OSError, ValueError, IndexError):
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        if soft != resource.RLIM_INFINITY:
            return max(0, soft - pages * resource.getpagesize())
    return None


def return_large_blocks() -> None:
    """Has glibc give blocks of 8 MiB and more back as soon as they are free. It keeps up to 32 MiB
    of each, for every thread: a third of what a worker took, with a model of 86 MB."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
