from typing import Any

import pytest

from murmuration.coordinator.registry import Registry
from murmuration.protos import murmuration_pb2 as pb
from murmuration.protos.documents import pack

MANIFEST = pack({"diloco": {"inner_steps": 50}})


def call(peer: str, manifest: bytes = MANIFEST, **changes: Any) -> pb.IntroduceRequest:
    said = {"address": f"{peer}:7700", "start_ms": 1, "phase": pb.PHASE_TRAINING} | changes
    return pb.IntroduceRequest(member=pb.Member(peer=peer, **said), manifest=manifest)


def names(registry: Registry, request: pb.IntroduceRequest, now: float) -> list[str]:
    return [member.peer for member in registry.introduce(request, now).members]


@pytest.fixture
def registry() -> Registry:
    return Registry()


def test_the_lost_are_not_handed_out_and_may_come_back(registry):
    registry.introduce(call("w0"), 0.0)
    assert names(registry, call("w1"), 16.0) == []
    assert registry.members["w0"].health(16.0) == "lost"
    registry.introduce(call("w0"), 17.0)
    assert registry.members["w0"].health(17.0) == "alive"
    assert names(registry, call("w1"), 18.0) == ["w0"]


def test_hands_out_the_manifest_of_the_first_and_refuses_another(registry):
    empty = registry.introduce(call("early", manifest=b""), 0.0)
    assert (empty.refusal, empty.manifest) == ("", b"")
    registry.introduce(call("w0"), 0.0)
    assert registry.introduce(call("late", manifest=b""), 1.0).manifest == MANIFEST
    reply = registry.introduce(call("w9", manifest=pack({"diloco": {"inner_steps": 25}})), 1.0)
    refusal = "the manifest is not this run's: diloco.inner_steps: 50 in this run, 25 in yours"
    assert (reply.refusal, list(reply.members)) == (refusal, [])
    assert "w9" not in registry.members
    assert registry.status(1.0)["refused"] == {"the manifest is not this run's": 1}


def test_the_newest_card_wins(registry):
    for now, start_ms, heartbeat, step, kept in (
        (0.0, 5, 7, 70, 70),
        (1.0, 5, 6, 60, 70),
        (2.0, 6, 0, 50, 50),
        (3.0, 5, 9, 90, 50),
    ):
        registry.introduce(call("w0", start_ms=start_ms, heartbeat=heartbeat, step=step), now)
        assert registry.members["w0"].member.step == kept
    assert registry.members["w0"].heard_s == 2.0


def test_an_epoch_that_cannot_be_takes_nobodys_place(registry):
    registry.introduce(call("w0", start_ms=7), 0.0)
    forged = registry.introduce(call("w0", start_ms=2**64 - 1, address="elsewhere:1"), 1.0)
    assert forged.refusal == "bad member: its start cannot be"
    assert registry.members["w0"].member.address == "w0:7700"


def test_a_worker_whose_clock_was_set_back_hears_of_its_earlier_epoch(registry):
    registry.introduce(call("w0", start_ms=90_000), 0.0)
    (earlier,) = registry.introduce(call("w0", start_ms=7), 1000.0).members
    assert (earlier.peer, earlier.start_ms) == ("w0", 90_000)
    assert not registry.introduce(call("w0", start_ms=90_001), 1001.0).members


def test_a_member_too_large_for_the_others_is_not_handed_out(registry):
    for size in (20_000, 1_000_000):
        refusal = registry.introduce(call("w1", profile=b"x" * size), 0.0).refusal
        assert "no worker would believe it" in refusal
    many = [pb.FragmentDigest(version=2**40, hash=2**60)] * 3000
    assert registry.introduce(call("w2", digests=many), 0.0).refusal
    assert names(registry, call("w0"), 1.0) == []
    assert registry.refused == {"bad member": 3}


def test_junk_is_counted_not_believed(registry):
    for bad in (call("x\x1b[2J"), call("n" * 300), call("w1", manifest=b"junk")):
        assert registry.introduce(bad, 0.0).refusal
    assert registry.status(0.0)["refused"] == {"bad member": 2, "the manifest cannot be read": 1}


def test_members_are_bounded(registry, monkeypatch):
    monkeypatch.setattr("murmuration.coordinator.registry.MAX_MEMBERS", 8)
    for index in range(8):
        registry.introduce(call(f"w{index}"), index / 8)
    assert registry.introduce(call("more"), 2.0).refusal == "full: 8 workers are here"
    assert registry.introduce(call("more"), 15.5).refusal == ""
    assert len(registry.members) == 8
    assert "w0" not in registry.members


def test_over_when_all_expected_are_done_or_long_silent(registry):
    registry.introduce(call("w0"), 0.0)
    registry.introduce(call("w1", phase=pb.PHASE_DONE), 0.0)
    for expected, now, over in ((2, 10.0, False), (3, 40.0, False), (2, 31.0, True)):
        assert registry.all_over(expected, now, 30.0) == over  # a third has never come
    assert [known.health(31.0) for known in registry.members.values()] == ["lost", "alive"]
    assert not registry.ended(10.0), "w0 may train on"
    assert registry.ended(16.0) == "the run is over: w1 is done"
