"""How many steps of a run fit into its time, and what the whole run would have taken.

A training run is modelled as inner steps of one length and rounds of one length, which come after
each other or, where the exchange overlaps, at the same time.
"""

from dataclasses import dataclass

from murmuration.algorithms.link import Link

_FP32_BITS = 32
_GOODPUT = 0.9  # of a link used both ways at once: headers and acknowledgements
_LEAST_ROUNDS = 2


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What an estimate needs to know of a preset or a system.

    Args:
        bits: per parameter that travels.
        overlaps: whether training goes on while a round is on its way.
        round_s: of a round, besides what the link takes.
        least_rounds: fewer would say little.
    """

    bits: float = _FP32_BITS
    overlaps: bool = False
    round_s: float = 0.05
    least_rounds: int = _LEAST_ROUNDS


_TRAITS = {
    "ddp": Traits(least_rounds=20),
    "torch-ddp": Traits(least_rounds=20),
    "streaming": Traits(bits=4.125, overlaps=True),
    "co2": Traits(overlaps=True),
    "onebit": Traits(bits=1.125, overlaps=True),
    "sparse": Traits(bits=0.4, overlaps=True),
    "streaming-noloco": Traits(bits=10.0, overlaps=True),
    "hivemind": Traits(round_s=2.0),  # finding its group
}


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of one run, in seconds.

    Args:
        step_s: of an inner step.
        inner_steps: between two rounds of the same parameters.
        round_s: of a round of all parameters.
    """

    step_s: float
    inner_steps: int
    round_s: float
    overlaps: bool = False
    least_rounds: int = _LEAST_ROUNDS

    @property
    def period_s(self) -> float:
        """Of `inner_steps` steps and their round."""
        steps_s = self.inner_steps * self.step_s
        return max(steps_s, self.round_s) if self.overlaps else steps_s + self.round_s

    def run_s(self, steps: int) -> float:
        return steps / self.inner_steps * self.period_s


def cost_of(
    name: str, *, params: int, workers: int, inner_steps: int, step_s: float, link: Link
) -> Cost:
    """What a preset or system will cost; one that is not known counts as blocking, in fp32.

    Each worker sends, and receives, 2(n-1)/n of the encoded parameters in a round.

    Args:
        step_s: as `local` has measured it.
    """
    traits = _TRAITS.get(name, Traits())
    sent_bits = 2 * (workers - 1) / workers * params * traits.bits
    travel_s = sent_bits / (link.rate_mbps * 1e6 * _GOODPUT) + 2 * (link.delay_s + link.jitter_s)
    return Cost(
        step_s=step_s,
        inner_steps=inner_steps,
        round_s=travel_s + traits.round_s,
        overlaps=traits.overlaps,
        least_rounds=traits.least_rounds,
    )


def steps_within(limit_s: float, asked: int, cost: Cost) -> int:
    """All steps that were asked for where they fit, else as many whole rounds as do.

    At least `cost.least_rounds` rounds even where those take longer, never more than asked for.
    """
    if cost.run_s(asked) <= limit_s:
        return asked
    rounds = max(cost.least_rounds, int(limit_s / cost.period_s))
    return min(asked, rounds * cost.inner_steps)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Figures of a run, in seconds; `wall_s` goes from the first inner step to the last."""

    steps: int
    wall_s: float
    compute_s: float
    stall_s: float
    rounds: int
    inner_steps: int


def wall_of(measured: Measured, steps: int) -> float:
    """The wall time of a run of so many steps, in seconds, as one of fewer steps foretells it.

    The round after the last step lies outside of the wall time, and its stall does not: of a run of
    two rounds only one pause is in the wall time, so rounds and steps have to grow apart.
    """
    if steps == measured.steps or measured.steps == 0:
        return measured.wall_s
    growth = steps / measured.steps
    after = 0 if measured.inner_steps == 1 else 1  # a step's own gradients are awaited within it
    inside = max(0, measured.rounds - after)
    pause_s = measured.stall_s / measured.rounds if measured.rounds else 0.0
    between_s = max(0.0, measured.wall_s - inside * pause_s)
    return between_s * growth + max(0.0, measured.rounds * growth - after) * pause_s
