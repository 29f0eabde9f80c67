"""What the simulated peers know of each other."""

from worker.simulation import Scenario
from worker.simulation.swarm import Swarm


def test_who_is_only_suspected_stays_in_the_draw_and_who_is_dead_does_not() -> None:
    swarm = Swarm(Scenario(peers=8, freeze_share=0.125, freeze_s=120.0))
    draw = [swarm.group(peer, 3) for peer in range(8)]
    frozen: list[int] = []

    def doubted() -> bool:
        frozen[:] = [n for n in range(8) if not swarm.view(0).usable(swarm.names[n])]
        return bool(frozen)

    swarm.clock.run(doubted, 1e6)
    name, news_s = swarm.names[frozen[0]], 1.0
    swarm.clock.run(lambda: False, swarm.clock.now + news_s)
    assert swarm.view(0).live(name)
    assert [swarm.group(peer, 3) for peer in range(8)] == draw

    swarm.clock.run(lambda: not swarm.view(0).live(name), 1e6)
    swarm.clock.at(swarm.clock.now + news_s, lambda: None)
    swarm.clock.run(lambda: False, swarm.clock.now + news_s)
    others = [swarm.group(peer, 3) for peer in range(8) if peer != frozen[0]]
    assert not any(name in group for group in others)
    assert [len(group) for group in others].count(1) == 1
