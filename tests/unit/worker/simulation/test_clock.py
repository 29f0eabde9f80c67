"""Virtual time: order, and when it ends."""

from murmuration.worker.simulation.clock import Clock


def test_acts_come_in_the_order_of_their_times_and_then_of_asking() -> None:
    clock, seen = Clock(), list[tuple[float, str]]()

    def act(name: str) -> None:
        seen.append((clock.now, name))

    clock.after(2.0, lambda: act("late"))
    clock.after(1.0, lambda: act("first"))
    clock.at(1.0, lambda: act("second"))
    clock.after(1.0, lambda: clock.after(0.5, lambda: act("asked meanwhile")))
    clock.run(lambda: False, limit_s=10)
    assert seen == [(1.0, "first"), (1.0, "second"), (1.5, "asked meanwhile"), (2.0, "late")]
    assert clock.events == 5


def test_it_ends_when_all_is_done_or_the_time_is_over() -> None:
    clock, seen = Clock(), list[float]()
    for time_s in (1.0, 2.0, 3.0, 4.0):
        clock.at(time_s, lambda: seen.append(clock.now))
    clock.run(lambda: len(seen) == 2, limit_s=10)
    assert seen == [1.0, 2.0]
    clock.run(lambda: False, limit_s=3.5)
    assert seen == [1.0, 2.0, 3.0]
    assert clock.now == 3.0
