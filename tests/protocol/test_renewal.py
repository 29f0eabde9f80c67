"""When a certificate is renewed, on a virtual clock: a worker's and a coordinator's."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest

from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker.identity import Authority, Identity, Renewal, Role
from murmuration.worker.identity.gate import KeyHolders
from murmuration.worker.transport import Unreachable
from tests.protocol.virtual_time import run

T = TypeVar("T")
HOUR_S = 3600.0


async def offload(work: Callable[[], T], /) -> T:
    return work()


class Scenario:
    """One process with a certificate that began 30 days ago and is due in 8 hours."""

    def __init__(self, folder: Path, role: Role) -> None:
        self.run = Authority.make(folder / "authority")
        self.held = self.first = self.run.new_identity(role, "somebody", valid_s=15.5 * 24 * HOUR_S)
        self.events: list[dict[str, object]] = []
        self.asked_at: list[float] = []
        self.renewed_at: float | None = None
        self.began = datetime.now(UTC)

    async def ask(self, request: pb.EnrolRequest) -> bytes | None:
        self.asked_at.append(self.clock())
        return None

    def clock(self) -> float:
        return asyncio.get_running_loop().time()

    def show(self, identity: Identity) -> None:
        self.held, self.renewed_at = identity, self.clock()

    async def wait(self, hours: float, *, holds_key: bool) -> None:
        renewal = Renewal(
            self.first,
            self.run if holds_key else None,
            ask=self.ask,
            keep=lambda identity: None,
            renewed=self.show,
            offload=offload,
            log=self.events.append,
            now=lambda: self.began + timedelta(seconds=self.clock()),
        )
        with suppress(TimeoutError):
            await asyncio.wait_for(renewal.run(), hours * HOUR_S)


@pytest.mark.parametrize("role", [Role.COORDINATOR, Role.PEER])
def test_it_is_renewed_when_a_third_of_its_time_is_left(tmp_path: Path, role: Role) -> None:
    there = Scenario(tmp_path, role)
    run(there.wait(20, holds_key=True))
    assert there.renewed_at == pytest.approx(8 * HOUR_S, abs=11)
    assert (there.held.role, there.held.name, there.held.key) == (role, "somebody", there.first.key)
    assert there.held.expires - there.first.expires > timedelta(days=300)
    assert [event["event"] for event in there.events] == ["renewed"]


def test_who_has_no_key_asks_once_a_minute_and_says_that_nobody_renews_it(tmp_path: Path) -> None:
    there = Scenario(tmp_path, Role.PEER)
    run(there.wait(9, holds_key=False))
    assert there.asked_at[0] == pytest.approx(8 * HOUR_S, abs=11)
    assert 50 <= len(there.asked_at) <= 61
    assert there.held is there.first
    (warning,) = there.events
    assert "nobody that answers holds the run's key" in str(warning["text"])


def test_those_that_may_hold_the_key_are_asked_in_their_order_until_one_gives_a_certificate() -> (
    None
):
    asked: list[str] = []

    class Transport:
        async def call(self, address: str, *_: object) -> bytes:
            asked.append(address)
            if address == "coordinator":
                raise Unreachable("it is away")
            refusal = "" if address == "third" else "the key is not here"
            return pb.EnrolReply(refusal=refusal, certificate=b"later").SerializeToString()

    there: Any = Transport()
    holders = KeyHolders(there, lambda: ["coordinator", "joined", "third", "fourth"])
    assert run(holders.ask(pb.EnrolRequest())) == b"later"
    assert asked == ["coordinator", "joined", "third"]
