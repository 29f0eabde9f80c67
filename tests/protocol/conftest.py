"""Protocol tests: the real state machines and nodes on a virtual clock, with seeded faults."""

import asyncio
import gc
import inspect
import time
from collections.abc import Iterator

import pytest

from tests.protocol import swarm
from tests.protocol.virtual_time import run


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine runs on a virtual clock of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = pyfuncitem._fixtureinfo.argnames
    run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in given}))
    return True


@pytest.fixture(scope="session", autouse=True)
def libraries_frozen() -> Iterator[None]:
    """`run` collects garbage after each test; what was imported need not be looked at again."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def virtual_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer's start, and with it whom it gossips with, comes from the virtual clock."""

    def time_ns() -> int:
        try:
            return int(1e9 * (1_000_000 + asyncio.get_running_loop().time()))
        except RuntimeError:
            return int(1e15)

    monkeypatch.setattr(time, "time_ns", time_ns)


@pytest.fixture
def brief_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs without consensus never agree: there is nothing to stay for in the end."""
    monkeypatch.setattr(swarm, "SETTLE_S", 5.0)
