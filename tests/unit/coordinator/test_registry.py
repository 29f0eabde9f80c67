import pytest

from murmuration.coordinator.registry import Registry
from murmuration.protos import murmuration_pb2 as pb
from murmuration.protos.documents import pack

MANIFEST = pack({"diloco": {"inner_steps": 50}})


def call(
    peer: str,
    *,
    epoch: int = 1,
    heartbeat: int = 0,
    step: int = 0,
    manifest: bytes = MANIFEST,
    address: str = "",
    phase: "pb.Phase.ValueType" = pb.PHASE_TRAINING,
) -> pb.IntroduceRequest:
    member = pb.Member(
        peer=peer,
        address=address or f"{peer}:7700",
        epoch=epoch,
        heartbeat=heartbeat,
        step=step,
        phase=phase,
    )
    return pb.IntroduceRequest(member=member, manifest=manifest)


def names(registry: Registry, request: pb.IntroduceRequest, now: float) -> list[str]:
    return [member.peer for member in registry.introduce(request, now).members]


def test_the_lost_are_not_handed_out_and_may_come_back() -> None:
    registry = Registry()
    registry.introduce(call("w0"), 0.0)
    assert names(registry, call("w1"), 16.0) == []
    assert registry.members["w0"].health(16.0) == "lost"
    registry.introduce(call("w0"), 17.0)
    assert registry.members["w0"].health(17.0) == "alive"
    assert names(registry, call("w1"), 18.0) == ["w0"]


def test_hands_out_the_manifest_of_the_first_and_refuses_another() -> None:
    registry = Registry()
    empty = registry.introduce(call("early", manifest=b""), 0.0)
    assert (empty.refusal, empty.manifest) == ("", b"")
    registry.introduce(call("w0"), 0.0)
    assert registry.introduce(call("late", manifest=b""), 1.0).manifest == MANIFEST
    other = pack({"diloco": {"inner_steps": 25}})
    reply = registry.introduce(call("w9", manifest=other), 1.0)
    assert reply.refusal == (
        "the manifest is not this run's: diloco.inner_steps: 50 in this run, 25 in yours"
    )
    assert list(reply.members) == []
    assert "w9" not in registry.members
    assert registry.status(1.0)["refused"] == {"the manifest is not this run's": 1}


def test_the_newest_card_wins() -> None:
    registry = Registry()
    registry.introduce(call("w0", epoch=5, heartbeat=7, step=70), 0.0)
    registry.introduce(call("w0", epoch=5, heartbeat=6, step=60), 1.0)
    assert registry.members["w0"].member.step == 70
    registry.introduce(call("w0", epoch=6, heartbeat=0, step=50), 2.0)
    assert registry.members["w0"].member.step == 50
    registry.introduce(call("w0", epoch=5, heartbeat=9, step=90), 3.0)
    assert registry.members["w0"].member.step == 50
    assert registry.members["w0"].heard_s == 2.0


def test_an_epoch_that_cannot_be_takes_nobodys_place() -> None:
    registry = Registry()
    registry.introduce(call("w0", epoch=7), 0.0)
    forged = registry.introduce(call("w0", epoch=2**64 - 1, address="elsewhere:1"), 1.0)
    assert forged.refusal == "bad member: its epoch cannot be"
    assert registry.members["w0"].member.address == "w0:7700"


def test_a_worker_whose_clock_was_set_back_hears_of_its_earlier_epoch() -> None:
    registry = Registry()
    registry.introduce(call("w0", epoch=90_000), 0.0)
    (earlier,) = registry.introduce(call("w0", epoch=7), 1000.0).members
    assert (earlier.peer, earlier.epoch) == ("w0", 90_000)
    assert not registry.introduce(call("w0", epoch=90_001), 1001.0).members


def test_a_member_too_large_for_the_others_is_not_handed_out() -> None:
    registry = Registry()
    for size in (20_000, 1_000_000):
        large = call("w1")
        large.member.profile = b"x" * size
        assert "no worker would believe it" in registry.introduce(large, 0.0).refusal
    many = call("w2")
    many.member.digests.extend([pb.FragmentDigest(version=2**40, hash=2**60)] * 3000)
    assert registry.introduce(many, 0.0).refusal
    assert names(registry, call("w0"), 1.0) == []
    assert registry.refused == {"bad member": 3}


def test_junk_is_counted_not_believed() -> None:
    registry = Registry()
    for bad in (call("x\x1b[2J"), call("n" * 300), call("w1", manifest=b"junk")):
        assert registry.introduce(bad, 0.0).refusal
    assert registry.status(0.0)["refused"] == {"bad member": 2, "the manifest cannot be read": 1}


def test_members_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("murmuration.coordinator.registry.MAX_MEMBERS", 8)
    registry = Registry()
    for index in range(8):
        registry.introduce(call(f"w{index}"), index / 8)
    assert registry.introduce(call("more"), 2.0).refusal == "full: 8 workers are here"
    assert registry.introduce(call("more"), 15.5).refusal == ""
    assert len(registry.members) == 8
    assert "w0" not in registry.members


def test_over_when_all_expected_are_done_or_long_silent() -> None:
    registry = Registry()
    registry.introduce(call("w0"), 0.0)
    registry.introduce(call("w1", phase=pb.PHASE_DONE), 0.0)
    assert not registry.all_over(2, 10.0, 30.0)
    assert not registry.all_over(3, 40.0, 30.0)  # the third has never come
    assert registry.all_over(2, 31.0, 30.0)
    healths = {name: known.health(31.0) for name, known in registry.members.items()}
    assert healths == {"w0": "lost", "w1": "alive"}


def test_the_status_document() -> None:
    registry = Registry()
    request = call("w0", step=7)
    request.member.digests.extend([pb.FragmentDigest(version=3), pb.FragmentDigest(version=2)])
    registry.introduce(request, 0.0)
    document = registry.status(2.0)
    assert document["kind"] == "coordinator"
    assert len(str(document["run"])) == 16
    assert document["members"] == [
        {
            "peer": "w0",
            "address": "w0:7700",
            "health": "alive",
            "phase": "training",
            "step": 7,
            "versions": [3, 2],
            "heard_s_ago": pytest.approx(2.0),
        }
    ]
