"""Peers that come late, or were away: they adopt the swarm's state, and end equal. And those
whose first peer leaves or dies before they have begun: nobody waits for ever."""

import json
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from murmuration.algorithms.plan import PRESETS, Plan
from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker import wire
from murmuration.worker.catchup.held_states import HeldStates
from murmuration.worker.errors import PeersUnreachable
from murmuration.worker.identity.authority import Credentials
from murmuration.worker.membership.first_contact import CoordinatorClient
from tests.protocol import problem as problem_module
from tests.protocol.problem import Problem, steady
from tests.protocol.swarm import Peer, Swarm
from tests.protocol.taps import Passing

NAMES = "abcd"


async def test_a_frozen_peer_is_fenced_and_catches_up():
    """As SIGSTOP for a third of a minute, amid a round's steps."""
    async with Swarm(steady(70), NAMES, at=2) as swarm:
        await swarm.sleep(1.23)
        swarm.freeze("d")
        stood = swarm["d"].versions
        await swarm.sleep(20)
        assert swarm["d"].versions == stood
        assert swarm["a"].versions[0] > stood[0] + 3
        swarm.thaw("d")
        await swarm.until(swarm.agrees, 10)
        await swarm.ends_equal(versions=(14,))
        assert swarm["d"].of_kind("adopted")
        assert swarm["a"].of_kind("round")[-1]["contributors"] == 4
        for peer in (swarm["a"], swarm["b"], swarm["c"]):
            assert peer.of_kind("round_failed") == []
            assert peer.of_kind("adopted") == []


async def test_a_peer_whose_train_thread_is_busy_fetches_once():
    """As in a validation of minutes, while the others hold round after round."""
    step_s, frames = dict.fromkeys(NAMES, 0.5), list[str]()

    def tap(passing: Passing) -> bytes:
        if (passing.source, passing.method, passing.up) == ("d", "Data/Fetch", False):
            frames.extend(["frame"] * pb.FetchReply.FromString(passing.message).HasField("frame"))
        return passing.message

    async with Swarm(replace(steady(100_000), step_s=step_s), NAMES, at=2) as swarm:
        swarm.tap, step_s["d"] = tap, 120.0
        await swarm.sleep(100)
        assert swarm["a"].versions[0] > swarm["d"].versions[0] + 10
        assert len(frames) == 2  # of anchor and momentum
        step_s["d"] = 0.5
        await swarm.until(swarm.agrees, 60)
        assert swarm["d"].of_kind("adopted")


@pytest.mark.parametrize("coordinated", [False, True])
async def test_one_member_that_refuses_all_keeps_no_joiner_out(coordinated):
    """Others let it in, whoever answers first; it is told who does not."""

    async def refuses(*_: object) -> bytes:
        return pb.JoinReply(refusal="no").SerializeToString()

    async def names(_: bytes) -> bytes:
        said = [wire.member_to_message(swarm[name].node.gossip.me) for name in "xaba"]
        said[-1].peer, said[-1].address = "gone", "nowhere"  # always asked by now: it says nothing
        return pb.IntroduceReply(members=said).SerializeToString()

    async with Swarm(steady(100_000), "abx", at=2) as swarm:
        swarm.network.close_port("nowhere", silent=True)
        x, packed = swarm["x"].node.server, swarm.problem.manifest.pack()
        x.calls_by["Control/Join"], x.calls["Coordinator/Introduce"] = refuses, names
        node = (await swarm.join("d", via="" if coordinated else "xa", min_peers=None)).node
        if coordinated:
            node._coordinator = CoordinatorClient("x", packed, node._first_contact, node)
        await swarm.until(lambda: swarm["d"].versions > (3,), 30)
        await swarm.sleep(10)
        assert swarm["d"].warned("x refuses this peer: no; going on without it")


@pytest.mark.parametrize("at_s", [2.6, 4.96, 5.04])
async def test_a_late_joiner_adopts_and_ends_equal(at_s):
    async with Swarm(steady(30), "abc") as swarm:
        await swarm.sleep(at_s)
        await swarm.join("d", via="a")
        await swarm.ends_equal(versions=(6,))
        assert swarm["d"].of_kind("adopted")[0]["reason"] == "joining"
        assert swarm["d"].trainer.metrics.inner_steps < 30
        assert swarm["d"].of_kind("round_failed") == []
        assert swarm["a"].of_kind("round")[-1]["contributors"] == 4


async def test_a_round_that_is_laid_out_without_a_joiner_is_the_others():
    """It has computed before they have, but they have not agreed on it."""
    async with Swarm(replace(steady(30), step_s={"d": 0.001}), "abc") as swarm:
        await swarm.until(lambda: swarm["a"].versions >= (3,), 10)
        await swarm.join("d", via="a")
        await swarm.ends_equal(versions=(6,))
        assert swarm["d"].of_kind("round_failed") == []
        contributors = {e["round"]: e["contributors"] for e in swarm["a"].of_kind("round")}
        entered = swarm["d"].of_kind("round")
        assert [e["missed"] for e in entered[:2]] == [True, False]
        assert [contributors[e["round"]] for e in entered[:2]] == [3, 4]


@pytest.mark.parametrize(("seed", "at_s"), [(0, 0.3), (1, 1.3), (0, 2.2)])
async def test_a_peer_joins_before_the_first_round_has_closed(seed, at_s):
    """Everyone is at version 0, but laid out over other groups; `b` is slow, so the round waits."""
    problem = Problem(steps=30, plan=Plan(inner_steps=10), step_s={"b": 0.3}, seed=seed)
    async with Swarm(problem, "ab") as swarm:
        await swarm.sleep(at_s)
        await swarm.join("c", via="b")
        await swarm.ends_equal(60, versions=(3,))
        for peer in swarm.alive:
            assert all(event["stall_s"] < 10 for event in peer.of_kind("round"))
        (adopted,) = swarm["c"].of_kind("adopted")
        assert adopted["reason"] == "joining"
        # All hold the same first values: nobody sends them.
        assert swarm["c"].transport.traffic.received["Data/Fetch"] < problem.encoded_bytes / 4


async def test_a_joiner_takes_over_other_first_values_of_one_that_starts(monkeypatch):
    """For a moment it gives not what it has announced."""
    of, number = problem_module._generator, count()
    other = lambda seed, name: of(seed, f"{name}{next(number) if name == 'start' else ''}")  # noqa: E731
    monkeypatch.setattr(problem_module, "_generator", other)
    async with Swarm(Problem(steps=30, plan=Plan(inner_steps=10)), "", delay_s=0.001) as swarm:
        await swarm.join("a", via="", min_peers=2)
        joiner = await swarm.join("b", via="a", min_peers=None)
        await swarm.ends_equal(60, versions=(3,))
        assert joiner.warnings == []


@pytest.mark.parametrize(("others", "frozen_s"), [("ab", 60), ("a", 60)])
async def test_a_joiner_that_sleeps_before_its_first_round_has_nothing_to_lose(others, frozen_s):
    """Its own rounds have counted nobody, so it follows the others however far they have gone."""
    async with Swarm(steady(100_000), others, at=2) as swarm:
        joiner = await swarm.join("c", via=others)
        await swarm.until(lambda: joiner.of_kind("adopted") != [], 30)
        swarm.freeze("c")
        await swarm.sleep(frozen_s)
        swarm.thaw("c")
        await swarm.until(swarm.agrees, 5)
        assert joiner.warnings == swarm["a"].warnings == []
        assert swarm["a"].of_kind("adopted") == []


async def test_a_peer_that_joins_a_finished_swarm_takes_its_state(tmp_path):
    """And remembers that the run is over."""
    async with Swarm(Problem(steps=6), "ab") as swarm:
        await swarm.until(lambda: swarm["a"].trainer.step >= 6, 10)
        await swarm.join("c", via="a")
        swarm["c"].node._credentials = Credentials(folder=tmp_path)
        await swarm.ends_equal(versions=(2,))
    assert json.loads((tmp_path / "members.json").read_text())["over"]


@pytest.mark.parametrize(("wanted", "says"), [(3, "2 of 3 peers after 60 s"), (None, "no start")])
async def test_too_few_peers_is_an_error_that_says_so(wanted, says):
    async with Swarm(Problem()) as swarm:
        await swarm.join("a", via=[], min_peers=3, wait_s=100)
        await swarm.join("b", via=["a", "nowhere"], min_peers=wanted)
        with pytest.raises(PeersUnreachable, match=rf"{says} .*; tried: nowhere.*; a answered; st"):
            await swarm.finished(120)


LIMIT_S = 60.0
PATIENT: dict[str, Any] = {"min_peers": None, "wait_s": float("inf")}


async def goes(swarm: Swarm, name: str, how: str) -> None:
    """Args: how: the method of the swarm."""
    if (leaving := getattr(swarm, how)(name)) is not None:
        await leaving


def knows(peer: Peer, name: str) -> bool:
    return any(member["peer"] == name for member in peer.members)


async def ended(swarm: Swarm, name: str) -> PeersUnreachable:
    """How the peer ends, within a minute."""
    with pytest.raises(PeersUnreachable) as caught:
        await swarm.until(lambda: False, LIMIT_S)
    assert swarm[name].train.error is caught.value
    return caught.value


@pytest.mark.parametrize(
    ("how", "plan"),
    [
        ("kill", Plan(inner_steps=50)),
        ("freeze", PRESETS["noloco"]),
        ("leave", Plan(inner_steps=50)),
    ],
)
async def test_the_first_peer_goes_before_a_joiner_is_a_member(how, plan):
    async with Swarm(Problem(layers=(300, 200), plan=plan, steps=200)) as swarm:
        await swarm.join("a", via=())
        await swarm.sleep(1.0)
        await goes(swarm, "a", how)
        await swarm.join("b", via="a", **PATIENT)
        await swarm.until(lambda: swarm["b"].of_kind("awaiting") != [], 10)
        assert swarm["b"].of_kind("awaiting")[0]["here"] == ["b"]
        assert "there is no run to join any more: " in str(await ended(swarm, "b"))


@pytest.mark.parametrize(("how", "others"), [("kill", ["c"]), ("freeze", []), ("leave", ["c"])])
async def test_the_first_peer_goes_while_it_waits_for_more(how, others):
    """None of the joiners has anything of a run: it has not begun."""
    async with Swarm(Problem()) as swarm:
        await swarm.join("a", via=(), min_peers=4)
        for name in ["b", *others]:
            await swarm.join(name, via="a", **PATIENT)
        await swarm.until(lambda: knows(swarm["b"], "a"), 5)
        await swarm.sleep(2.5)
        assert swarm["b"].of_kind("awaiting")[0]["here"] == ["a", "b", *others]
        await goes(swarm, "a", how)
        assert "a " in str(await ended(swarm, "b"))
        for name in others:
            with pytest.raises(PeersUnreachable):
                raise swarm[name].train.error or await ended(swarm, name)


@pytest.mark.parametrize(("how", "at_s"), [("kill", 0.0), ("kill", 0.5), ("leave", 0.2)])
async def test_the_first_peer_goes_while_its_state_is_fetched(how, at_s):
    """On a slow link; the joiner has the state and goes on, or ends with a line."""
    async with Swarm(replace(steady(4000), layers=(200_000,)), delay_s=0.1) as swarm:
        await swarm.join("a", via=())
        await swarm.until(lambda: swarm["a"].versions >= (1,), 30)
        b = await swarm.join("b", via="a", **PATIENT)
        await swarm.until(lambda: knows(b, "a"), 5)
        await swarm.sleep(at_s)
        await goes(swarm, "a", how)
        await swarm.until(lambda: b.of_kind("started") != [] or b.train.ended, LIMIT_S)
        assert b.train.error is None or isinstance(b.train.error, PeersUnreachable)


@pytest.mark.parametrize(
    ("how", "plan"),
    [("kill", PRESETS["noloco"]), ("freeze", Plan(inner_steps=3)), ("leave", PRESETS["noloco"])],
)
async def test_a_joiner_that_holds_the_state_goes_on_alone(how, plan):
    """After a restart of both, from what they have saved."""
    async with Swarm(Problem(layers=(300, 200), plan=plan, steps=300), "ab") as swarm:
        await swarm.until(lambda: swarm["b"].versions >= (1,), 300)
        before = swarm["b"].versions
        for name in "ab":
            swarm.kill(name)
        await swarm.sleep(10.0)
        await swarm.join("c", via=(), min_peers=3)
        again = await swarm.restart("b", via="c", before=swarm["b"], **PATIENT)
        await swarm.until(lambda: knows(again, "c"), 5)
        await goes(swarm, "c", how)
        await swarm.until(lambda: again.of_kind("started") != [], LIMIT_S)
        await swarm.until(lambda: again.versions > before, LIMIT_S)


async def test_a_joiner_whose_others_are_far_apart_goes_on_from_its_own_state(monkeypatch):
    """Else it would ask for theirs until it ends."""
    monkeypatch.setattr(HeldStates, "too_far", lambda *_: True)
    async with Swarm(steady(100_000), "abc", at=2) as swarm:
        swarm.kill("c")
        swarm.cut("a", "b")
        await swarm.sleep(30)
        swarm.heal("a", "b")
        await swarm.until(lambda: swarm["b"].warned("too far"), 60)
        again = await swarm.restart("c", via="ab", min_peers=None, before=swarm["c"])
        await swarm.until(lambda: again.of_kind("started") != [], 59)
        assert again.warned("goes on from its own state")


async def test_a_peer_that_is_back_in_time_is_waited_for():
    async with Swarm(Problem()) as swarm:
        await swarm.join("a", via=(), min_peers=2)
        await swarm.sleep(1.0)
        swarm.kill("a")
        b = await swarm.join("b", via=["a", "a'"], **PATIENT)
        await swarm.sleep(10.0)
        assert not b.train.ended
        await swarm.restart("a", via=(), min_peers=2)
        await swarm.ends_equal()


async def test_who_waits_hashes_its_state_once_for_a_group(monkeypatch):
    """And not at each look, twenty times a second."""
    hashed, state_hash = list[int](), wire.state_hash

    def counted(*of: Any) -> int:
        hashed.append(state_hash(*of))
        return hashed[-1]

    monkeypatch.setattr(wire, "state_hash", counted)
    async with Swarm(Problem()) as swarm:
        await swarm.join("a", via=(), min_peers=3)
        await swarm.join("b", via="a", **PATIENT)
        await swarm.sleep(50.0)
        assert len(hashed) < 10


async def test_an_address_that_says_nothing_holds_up_no_start():
    """It may be one of a former life. Asking there takes six seconds, each time."""
    async with Swarm(Problem()) as swarm:
        swarm.network.close_port("nowhere", silent=True)
        a = await swarm.join("a", via=["nowhere"], min_peers=2)
        await swarm.sleep(7.0)
        await swarm.join("b", via="a", **PATIENT)
        await swarm.until(lambda: a.of_kind("started") != [], 1)
