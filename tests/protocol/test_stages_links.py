"""Links are measured while a swarm trains: all of them, a newcomer's too, again after a fault."""

from dataclasses import replace

from murmuration.algorithms.plan import PRESETS
from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker.pipeline.profile import Profile
from tests.protocol.stage_swarm import StagedProblem, StageSwarm
from tests.protocol.taps import Passing, once
from tests.protocol.virtual_time import run

NEVER = 10_000  # steps: nobody ends by itself
PROBLEM = StagedProblem(
    count=3,
    layers=3,
    microbatches=2,
    steps=NEVER,
    plan=replace(PRESETS["diloco"], inner_steps=NEVER),
    forward_s={f"{stage}{letter}": 1.0 for stage in range(3) for letter in "ab"},
)


def told(swarm: StageSwarm, name: str) -> dict[str, Profile]:
    """What a peer has heard of the others' measurements, and its own."""
    members = swarm[name].node.gossip.members
    return {member.peer: Profile.unpack(member.profile) for member in members if member.live}


def all_links_are_told(swarm: StageSwarm) -> bool:
    """Whether everyone has heard latency and rate of every link, those inside a stage too."""
    names = {peer.name for peer in swarm.alive}
    return all(
        names - {name} <= profile.rate_bytes_per_s.keys() & profile.latency_s.keys()
        for peer in swarm.alive
        for name, profile in told(swarm, peer.name).items()
    )


def test_all_links_are_measured_and_a_newcomers_by_those_who_were_there() -> None:
    async def scenario() -> None:
        async with StageSwarm(PROBLEM) as swarm:
            await swarm.start_all({0: 1, 1: 2, 2: 1})
            await swarm.until(lambda: all_links_are_told(swarm), 20.0)
            await swarm.until(lambda: all(row["visits_per_s"] for row in swarm["0a"].members), 30.0)
            await swarm.join("2b", ["0a"])
            await swarm.until(
                lambda: len(told(swarm, "0a")) == 5 and all_links_are_told(swarm), 30.0
            )

    run(scenario())


def test_a_link_that_was_cut_is_measured_once_it_is_there() -> None:
    async def scenario() -> None:
        async with StageSwarm(PROBLEM) as swarm:
            swarm.network.cut("1a", "1b")
            await swarm.start_all({0: 1, 1: 2, 2: 1})
            await swarm.sleep(20.0)
            assert not swarm["1a"].node.stages.context.measurements.measured_at("1b")
            assert swarm["1a"].node.stages.context.measurements.measured_at("2a")
            swarm.network.heal("1a", "1b")
            await swarm.until(lambda: all_links_are_told(swarm), 40.0)

    run(scenario())


def test_peers_agree_on_the_figures_and_one_that_plans_with_others_is_noticed() -> None:
    async def scenario() -> None:
        async with StageSwarm(PROBLEM) as swarm:
            await swarm.start_all({0: 1, 1: 2, 2: 1})
            await swarm.until(lambda: all_links_are_told(swarm), 20.0)
            await swarm.sleep(60.0)  # until real traffic outweighs probes
            settled = swarm.total("other_snapshots")
            await swarm.sleep(30.0)
            assert swarm.total("other_snapshots") == settled

            def is_header(p: Passing) -> bool:
                first = p.up and p.method == "Data/StageCall" and p.source == "0a"
                return first and pb.StageCallUp.FromString(p.message).HasField("header")

            def planned_otherwise(p: Passing) -> bytes:
                up = pb.StageCallUp.FromString(p.message)
                up.header.snapshot += 1
                return up.SerializeToString()

            swarm.tap = once(is_header, planned_otherwise)
            await swarm.sleep(20.0)
            # By stage 1, and by stage 2, to whom it is passed on; the origin knows its own plans.
            assert swarm.total("other_snapshots") == settled + 2

    run(scenario())
