"""The plan of a run: fragments x schedule x exchange x wire codec x outer update x merge.

DiLoCo, data-parallel training and local training are settings of one engine, not code paths.
"""

from dataclasses import dataclass, replace
from typing import Literal

from algorithms.codecs import codec_by_name
from algorithms.outer import Nesterov
from algorithms.schedule import Schedule

Exchange = Literal["mean", "none"]
Payload = Literal["pseudo_gradient", "gradient"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How the peers of a run exchange.

    Args:
        inner_steps: H, inner steps between two rounds of one fragment.
        fragments: 1, or P fragments of layers plus one for the rest.
        pattern: `strided` or `sequential` layers in a fragment.
        overlap_steps: tau, inner steps between sending and applying.
        merge_alpha: share of the local parameters that survives a merge.
        exchange: `mean` over the group, or `none`.
        payload: what is averaged; `gradient` is data-parallel training, every step.
        codec: wire codec of contributions; `reduction_codec` of what comes back.
        outer_lr, outer_momentum: the outer Nesterov step. The defaults were chosen by runs of four
            workers on the built-in task; the paper's 0.7 and 0.9 are too hot for periods so short.

    Raises:
        ValueError: a value or a combination that cannot work, with the fix.
    """

    inner_steps: int = 20
    fragments: int = 1
    pattern: str = "strided"
    overlap_steps: int = 0
    merge_alpha: float = 0.0
    exchange: Exchange = "mean"
    payload: Payload = "pseudo_gradient"
    codec: str = "fp32"
    reduction_codec: str = "fp32"
    outer_lr: float = 0.9
    outer_momentum: float = 0.6

    def __post_init__(self) -> None:
        # The parts check their own values.
        Schedule(
            fragments=1, inner_steps=self.inner_steps, overlap_steps=self.overlap_steps, steps=1
        )
        Nesterov(self.outer_lr, self.outer_momentum)
        if self.fragments < 1:
            raise ValueError(f"fragments is {self.fragments}; it must be at least 1")
        codec_by_name(self.codec)
        codec_by_name(self.reduction_codec)
        if not 0 <= self.merge_alpha < 1:
            raise ValueError(
                f"merge_alpha is {self.merge_alpha}; it must be in 0..1, below 1 (1 would be no "
                "communication: use the preset `local`)"
            )
        if self.payload == "gradient" and (self.inner_steps, self.overlap_steps) != (1, 0):
            raise ValueError(
                "averaging gradients needs inner_steps = 1 and overlap_steps = 0; "
                "leave both out, or use the preset `diloco`"
            )
        for field, known in (
            ("exchange", ("mean", "none")),
            ("payload", ("pseudo_gradient", "gradient")),
            ("pattern", ("strided", "sequential")),
        ):
            if getattr(self, field) not in known:
                raise ValueError(
                    f"{field} is {getattr(self, field)!r}; use one of {', '.join(known)}"
                )

    def schedule(self, *, fragments: int, steps: int) -> Schedule:
        """The rounds of a run of `steps` inner steps with so many fragments in fact."""
        return Schedule(
            fragments=fragments,
            inner_steps=self.inner_steps,
            overlap_steps=self.overlap_steps,
            steps=steps,
        )


_DILOCO = Plan()

PRESETS: dict[str, Plan] = {
    "diloco": _DILOCO,
    "ddp": replace(_DILOCO, inner_steps=1, payload="gradient"),
    "local": replace(_DILOCO, exchange="none"),
}
