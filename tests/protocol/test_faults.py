"""What a swarm must survive: crashes, cut links, partitions, freezes, late joiners."""

from collections.abc import Callable

import pytest
import torch

from algorithms.plan import Plan
from algorithms.rendezvous import reducer_orders
from tests.protocol.problem import Problem
from tests.protocol.swarm import Passing, Swarm, Tap
from tests.protocol.virtual_time import run
from worker.errors import PeersUnreachable
from worker.membership import MembershipConfig
from worker.transport import Unreachable

NAMES = "abcd"
MEMBERSHIP = MembershipConfig()

# A shard of three peers is over 1 MiB, so that it crosses in two frames.
TWO_FRAMES = Problem(layers=(1_200_000,), steps=3)
SHARD_BYTES = 4 * 400_000


def steady(steps: int, seed: int = 0, inner_steps: int = 5) -> Problem:
    """Half a second a step: long enough for faults that last a minute."""
    return Problem(
        steps=steps,
        plan=Plan(inner_steps=inner_steps),
        step_s=dict.fromkeys("abcde", 0.5),
        seed=seed,
    )


def once(what: Callable[[Passing], bool], act: Callable[[Passing], bytes]) -> Tap:
    """A tap that acts on the first message for which `what` holds."""
    acted: list[Passing] = []

    def tap(passing: Passing) -> bytes:
        if not acted and what(passing):
            acted.append(passing)
            return act(passing)
        return passing.message

    return tap


def frame_up(source: str, target: str | None = None) -> Callable[[Passing], bool]:
    """A contribution's frame from one peer."""
    return lambda p: (
        p.up and p.source == source and p.target == (target or p.target) and p.body == "frame"
    )


# -------------------------------------------------------------------------------------- crashes


@pytest.mark.parametrize("peers", [2, 3, 4, 5])
@pytest.mark.parametrize("round_", [0, 2])
def test_a_peer_killed_amid_its_exchange(peers: int, round_: int) -> None:
    names = "abcde"[:peers]
    victim = names[-1]

    async def scenario() -> None:
        async with Swarm(Problem(steps=15)) as swarm:

            def kill(passing: Passing) -> bytes:
                swarm.kill(victim)
                return passing.message

            amid = frame_up(victim)
            swarm.tap = once(lambda p: amid(p) and swarm[victim].versions == (round_,), kill)
            await swarm.start(*names)
            await swarm.finished()
            assert swarm[victim].killed
            swarm.assert_equal(versions=(5,))
            for peer in swarm.alive:
                assert peer.of_kind("round_failed") == []
                counted = [event["contributors"] for event in peer.of_kind("round")]
                assert counted[:round_] == [peers] * round_
                assert counted[round_ + 1 :] == [peers - 1] * (4 - round_)
                assert max(e["stall_s"] for e in peer.of_kind("round")) < MEMBERSHIP.detection_s(
                    peers
                )

    run(scenario())


def test_all_but_one_are_killed() -> None:
    async def scenario() -> None:
        async with Swarm(Problem(steps=15)) as swarm:
            await swarm.start(*NAMES)
            await swarm.until(lambda: swarm["a"].versions >= (1,), 10)
            for name in "bcd":
                swarm.kill(name)
            await swarm.finished(60)
            assert swarm["a"].versions == (5,)
            assert swarm["a"].of_kind("round")[-1]["contributors"] == 1

    run(scenario())


def test_peers_are_killed_one_after_another() -> None:
    async def scenario() -> None:
        async with Swarm(steady(60)) as swarm:
            await swarm.start(*"abcde")
            for name, version in (("e", 1), ("d", 4), ("c", 7)):
                await swarm.until(lambda v=version: swarm["a"].versions >= (v,), 60)
                swarm.kill(name)
            await swarm.finished()
            swarm.assert_equal(versions=(12,))
            assert swarm["a"].of_kind("round")[-1]["contributors"] == 2

    run(scenario())


@pytest.mark.parametrize("answered", [0, 1, 2])
@pytest.mark.parametrize("shard", [0, 1])
@pytest.mark.parametrize("last_round", [False, True], ids=["midway", "at the end"])
def test_a_reducer_killed_after_it_has_answered_one_contributor(
    answered: int, shard: int, last_round: bool
) -> None:
    """Only one peer knows the reduction: the successor in the shard's order, or another one."""
    problem = Problem(steps=12 if last_round else 30)
    round_ = 3
    reducer, *others = reducer_orders(problem.manifest.run, 0, round_, NAMES)[shard]
    lucky = others[answered]

    async def scenario() -> None:
        async with Swarm(problem) as swarm:

            def tap(passing: Passing) -> bytes:
                down = not passing.up and passing.target == reducer
                if down and passing.body in ("header", "frame"):
                    if swarm[reducer].versions >= (round_,) and passing.source != lucky:
                        swarm.network.cut(reducer, passing.source)
                        raise Unreachable("the answer is lost")
                    if swarm[reducer].versions >= (round_,) and passing.body == "frame":
                        swarm.kill(reducer)
                return passing.message

            swarm.tap = tap
            await swarm.start(*NAMES)
            await swarm.finished()
            assert swarm[reducer].killed
            assert len(swarm.alive) == 3
            swarm.assert_equal()
            # Who applied the other reduction of the shard loses that round at most.
            assert swarm.alive[0].versions[0] >= problem.steps // 3 - 1
            assert not any(peer.train.error for peer in swarm.alive)

    run(scenario())


# ---------------------------------------------------------------------------------------- links


def test_a_link_cut_amid_a_contribution_resumes_and_counts_once() -> None:
    async def scenario() -> None:
        async with Swarm(TWO_FRAMES) as swarm:

            def cut(passing: Passing) -> bytes:
                # While the second frame is on its way, when the first has arrived.
                swarm.loop.call_later(0.005, swarm.network.cut, "a", "b")
                swarm.loop.call_later(0.6, swarm.network.heal, "a", "b")
                return passing.message

            swarm.tap = once(lambda p: frame_up("a", "b")(p) and p.offset > 0, cut)
            await swarm.start(*"abc")
            await swarm.finished()
            swarm.assert_reference()
            lost = SHARD_BYTES - 1024 * 1024
            assert swarm["b"].payload_received_bytes == 4 * SHARD_BYTES
            assert swarm["a"].payload_sent_bytes == 4 * SHARD_BYTES + lost
            assert swarm["c"].payload_sent_bytes == 4 * SHARD_BYTES

    run(scenario())


def test_a_link_cut_amid_a_reduction_resumes_at_its_offset() -> None:
    async def scenario() -> None:
        async with Swarm(TWO_FRAMES) as swarm:

            def cut(passing: Passing) -> bytes:
                swarm.network.cut("a", "b")
                swarm.loop.call_later(0.6, swarm.network.heal, "a", "b")
                return passing.message

            swarm.tap = once(
                lambda p: (p.up, p.source, p.target, p.body) == (False, "a", "b", "frame"), cut
            )
            await swarm.start(*"abc")
            await swarm.finished()
            swarm.assert_reference()
            assert swarm["a"].payload_received_bytes == 4 * SHARD_BYTES

    run(scenario())


@pytest.mark.parametrize("peers", [2, 3, 4])
@pytest.mark.parametrize("cut_s", [0.2, 3.0])
def test_short_cuts_at_any_moment_change_nothing(peers: int, cut_s: float) -> None:
    """Shorter than it takes to declare a peer dead: nobody's contribution is missed."""
    names = NAMES[:peers]

    async def scenario(frame: int) -> None:
        async with Swarm(Problem(steps=6)) as swarm:
            seen = 0

            def tap(passing: Passing) -> bytes:
                nonlocal seen
                seen += 1
                if seen == frame:
                    swarm.network.cut(names[0], names[1])
                    swarm.loop.call_later(cut_s, swarm.network.heal, names[0], names[1])
                return passing.message

            swarm.tap = tap
            await swarm.start(*names)
            await swarm.finished()
            assert seen >= frame
            swarm.assert_equal(versions=(2,))
            swarm.assert_reference()

    for frame in (1, 6, 12):
        run(scenario(frame))


def test_a_cut_that_is_not_healed_does_not_stop_the_others() -> None:
    """Two peers cannot reach each other, but everyone else reaches both."""

    async def scenario() -> None:
        async with Swarm(steady(25)) as swarm:
            await swarm.start(*NAMES)
            await swarm.until(lambda: swarm["a"].versions >= (2,), 30)
            swarm.network.cut("a", "b")
            for version in range(3, 6):
                await swarm.until(lambda v=version: swarm["c"].versions >= (v,), 60)
            await swarm.finished()
            swarm.assert_equal(versions=(5,))

    run(scenario())


# ----------------------------------------------------------------------------------- partitions


@pytest.mark.parametrize("seed", [0, 1])
def test_a_partition_heals_into_one_swarm(seed: int) -> None:
    async def scenario() -> None:
        async with Swarm(steady(150, seed)) as swarm:
            await swarm.start(*NAMES)
            await swarm.until(lambda: swarm["a"].versions >= (2,), 60)
            await swarm.sleep(0.31 * seed)
            swarm.cut("ab", "cd")
            await swarm.sleep(60)
            ours, theirs = swarm["a"], swarm["c"]
            assert min(*ours.versions, *theirs.versions) > 10  # both sides went on
            assert ours.outer_hash != theirs.outer_hash
            swarm.heal("ab", "cd")
            await swarm.until(swarm.agrees, 30)
            await swarm.finished()
            swarm.assert_equal()
            last = swarm["a"].of_kind("round")[-1]
            assert last["contributors"] == 4

    run(scenario())


def test_a_partition_into_single_peers_heals() -> None:
    async def scenario() -> None:
        async with Swarm(steady(120)) as swarm:
            await swarm.start(*NAMES)
            await swarm.until(lambda: swarm["a"].versions >= (2,), 60)
            for at, name in enumerate(NAMES):
                swarm.cut(name, NAMES[at + 1 :])
            await swarm.sleep(40)
            for at, name in enumerate(NAMES):
                swarm.heal(name, NAMES[at + 1 :])
            await swarm.until(swarm.agrees, 30)
            await swarm.finished()
            swarm.assert_equal()
            assert swarm["a"].of_kind("round")[-1]["contributors"] == 4

    run(scenario())


# --------------------------------------------------------------------------------------- freezes


@pytest.mark.parametrize("seed", [0, 3, 5])
def test_a_frozen_peer_is_fenced_and_catches_up(seed: int) -> None:
    """As SIGSTOP for a minute, at another moment of its round for each seed."""

    async def scenario() -> None:
        async with Swarm(steady(150, seed)) as swarm:
            await swarm.start(*NAMES)
            await swarm.until(lambda: swarm["a"].versions >= (2,), 60)
            await swarm.sleep(0.41 * seed)
            swarm.freeze("d")
            stood = swarm["d"].versions
            await swarm.sleep(60)
            assert swarm["d"].versions == stood
            assert swarm["a"].versions[0] > stood[0] + 15
            swarm.thaw("d")
            await swarm.until(swarm.agrees, 10)
            await swarm.finished()
            swarm.assert_equal(versions=(30,))
            assert swarm["d"].of_kind("adopted")
            assert swarm["a"].of_kind("round")[-1]["contributors"] == 4
            for peer in (swarm["a"], swarm["b"], swarm["c"]):
                assert peer.of_kind("round_failed") == []
                assert peer.of_kind("adopted") == []

    run(scenario())


@pytest.mark.parametrize("frozen_s", [0.5, 2.0, 3.5])
def test_a_short_freeze_costs_nothing_but_time(frozen_s: float) -> None:
    async def scenario() -> None:
        async with Swarm(Problem(steps=15)) as swarm:
            await swarm.start(*NAMES)
            await swarm.until(lambda: swarm["a"].versions >= (1,), 10)
            swarm.freeze("d")
            await swarm.sleep(frozen_s)
            swarm.thaw("d")
            await swarm.finished()
            swarm.assert_equal(versions=(5,))
            swarm.assert_reference()

    run(scenario())


# --------------------------------------------------------------------------------------- joiners


@pytest.mark.parametrize("at_s", [2.6, 3.3, 4.96, 5.0, 5.04])
def test_a_late_joiner_adopts_and_ends_equal(at_s: float) -> None:
    async def scenario() -> None:
        async with Swarm(steady(30)) as swarm:
            await swarm.start(*"abc")
            await swarm.sleep(at_s)
            await swarm.join("d", via="a")
            await swarm.finished()
            swarm.assert_equal(versions=(6,))
            first = swarm["d"].of_kind("adopted")[0]
            assert first["reason"] == "joining"
            assert swarm["d"].trainer.tally.inner_steps < 30
            assert swarm["d"].of_kind("round_failed") == []
            assert swarm["a"].of_kind("round")[-1]["contributors"] == 4

    run(scenario())


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("at_s", [0.3, 1.3, 2.2])
def test_a_peer_joins_before_the_first_round_has_closed(seed: int, at_s: float) -> None:
    """Everyone is at version 0, but laid out over other groups; `b` is slow, so the round waits."""
    problem = Problem(steps=30, plan=Plan(inner_steps=10), step_s={"b": 0.3}, seed=seed)

    async def scenario() -> None:
        async with Swarm(problem) as swarm:
            await swarm.start("a", "b")
            await swarm.sleep(at_s)
            await swarm.join("c", via="b")
            await swarm.finished(60)
            swarm.assert_equal(versions=(3,))
            for peer in swarm.alive:
                assert all(event["stall_s"] < 10 for event in peer.of_kind("round"))

    run(scenario())


def test_a_peer_that_is_started_anew_adopts_and_ends_equal() -> None:
    """Same name, another address and epoch: its former life is forgotten."""

    async def scenario() -> None:
        async with Swarm(steady(60)) as swarm:
            await swarm.start(*"abc")
            await swarm.until(lambda: swarm["a"].versions >= (2,), 60)
            swarm.kill("c")
            await swarm.sleep(8)
            await swarm.restart("c", via="a")
            await swarm.finished()
            swarm.assert_equal(versions=(12,))
            assert swarm["a"].of_kind("round")[-1]["contributors"] == 3

    run(scenario())


def test_a_peer_that_joins_a_finished_swarm_takes_its_state() -> None:
    async def scenario() -> None:
        async with Swarm(Problem(steps=6)) as swarm:
            await swarm.start(*"ab")
            await swarm.until(lambda: swarm["a"].trainer.step >= 6, 10)
            await swarm.join("c", via="a")
            await swarm.finished()
            swarm.assert_equal(versions=(2,))

    run(scenario())


def test_too_few_peers_is_an_error_that_says_so() -> None:
    async def scenario() -> None:
        async with Swarm(Problem()) as swarm:
            await swarm.join("a", via=["nowhere"], min_peers=2)
            await swarm.finished(120)

    with pytest.raises(PeersUnreachable, match="1 of 2 peers after 60 s"):
        run(scenario())


# ------------------------------------------------------------------------------- what is learned


def test_what_a_failed_round_has_counted_is_not_counted_again() -> None:
    """`a` cannot reach one reducer until its round has failed; the others count its other shards.

    All movement of the swarm is a's, before its first round: with outer learning rate 1 and no
    momentum, the anchor must move by a's share of the mean once, whichever round counts it.
    """
    problem = Problem(
        layers=(400,),
        steps=400,
        plan=Plan(inner_steps=2, outer_lr=1.0, outer_momentum=0.0),
        step_s=dict.fromkeys("abcd", 0.5),
    )

    async def scenario() -> None:
        async with Swarm(problem) as swarm:
            start = {}
            await swarm.start(*NAMES)
            for peer in swarm.alive:
                peer.replica.moves_until = 2 if peer.name == "a" else 0
                start[peer.name] = peer.trainer.states[0].anchor.clone()
            reducer = reducer_orders(problem.manifest.run, 0, 0, NAMES)[1][0]
            far = reducer if reducer != "a" else "b"
            swarm.network.cut("a", far)
            await swarm.until(lambda: bool(swarm["a"].of_kind("round_failed")), 120)
            moved = start["a"] - torch.cat(list(swarm["a"].replica.parameters.values()))
            swarm.network.heal("a", far)
            await swarm.until(lambda: swarm["a"].versions >= (3,), 120)
            await swarm.until(swarm.agrees, 60)
            ended = start["a"] - swarm["b"].trainer.states[0].anchor
            # A shard was closed by all four, or by the three that reach its reducer.
            shares = {round(share, 2) for share in (ended / moved).tolist()}
            assert shares <= {0.25, 0.33}

    run(scenario())
