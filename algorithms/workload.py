"""What a step costs and what a plan sends, as plain numbers."""

from dataclasses import dataclass
from functools import lru_cache

from murmuration.algorithms.codecs import codec_by_name
from murmuration.algorithms.fragments import Fragment, TensorSpec, layer_of, partition
from murmuration.algorithms.plan import Plan
from murmuration.algorithms.schedule import Schedule

_OUTSIDE = "outside"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and the time that one worker needs for a step of it.

    Args:
        step_s: one inner step, in seconds.
        layers: parameters of each layer, in the order of the forward pass.
        outside: parameters outside of the layers: embeddings, head, last norm.
        ddp_parameters: those that data-parallel training would send, where these are others; with
            `kseed` the layers are the vector of coefficients, and these are the model's.

    Raises:
        ValueError: a value that cannot be, with the fix.
    """

    step_s: float
    layers: tuple[int, ...]
    outside: int = 0
    ddp_parameters: int | None = None

    def __post_init__(self) -> None:
        if not self.step_s > 0:
            raise ValueError(f"a step of {self.step_s:g} s; it must take more than 0 s")
        if not self.layers or min(self.layers) < 1 or self.outside < 0:
            raise ValueError("a model needs at least one layer, and each layer a parameter")

    @property
    def parameters(self) -> int:
        return sum(self.layers) + self.outside

    def fragments(self, count: int, pattern: str = "strided") -> tuple[Fragment, ...]:
        """The fragments that `murmuration.algorithms.fragments.partition` makes of such a model.

        Raises:
            ValueError: fewer layers than fragments, or an unknown pattern.
        """
        return _partition(self.layers, self.outside, count, pattern)


@lru_cache(maxsize=64)  # a search asks for the same few thousands of times
def _partition(
    layers: tuple[int, ...], outside: int, count: int, pattern: str
) -> tuple[Fragment, ...]:
    schema = [TensorSpec(f"layers.{index}", (size,)) for index, size in enumerate(layers)]
    if outside:
        schema.append(TensorSpec(_OUTSIDE, (outside,)))
    return partition(schema, count, pattern)


def workload_of(parameters: dict[str, int], step_s: float) -> Workload:
    """A model's workload from its number of parameters by name.

    Names are read as `partition` reads them; a model without layers counts as one layer.
    """
    layers: dict[int, int] = {}
    outside = 0
    for name, elements in parameters.items():
        layer = layer_of(name)
        if layer is None:
            outside += elements
        else:
            layers[layer] = layers.get(layer, 0) + elements
    if not layers:
        return Workload(step_s=step_s, layers=(outside,))
    return Workload(
        step_s=step_s, layers=tuple(layers[index] for index in sorted(layers)), outside=outside
    )


@dataclass(frozen=True, kw_only=True)
class PlannedRounds:
    """What travels and when: fragment f after step offset(f), and every H steps from there.

    Args:
        inner_steps: H. overlap_steps: tau in 0..H.
        fragments: what is sent as a unit; none where nothing is exchanged.
        fragment_bits: of each fragment, what one worker sends for one round of it (and receives:
            links are the same both ways), from the moment it is due.
        ahead_bits: what it sends for all fragments in a period before they are due.

    Raises:
        ValueError: H, tau and the number of fragments do not fit one another.
    """

    inner_steps: int
    overlap_steps: int
    fragments: tuple[Fragment, ...]
    fragment_bits: tuple[float, ...]
    ahead_bits: float = 0.0

    def __post_init__(self) -> None:
        assert len(self.fragments) == len(self.fragment_bits)
        if self.fragments:
            self._schedule()

    @property
    def bits_per_period(self) -> float:
        return sum(self.fragment_bits) + self.ahead_bits

    def due(self) -> dict[int, tuple[int, ...]]:
        """The fragments sent after step 1..H of a period, by step; steps without any left out."""
        due: dict[int, tuple[int, ...]] = {}
        for index in range(len(self.fragments)):
            step = self._schedule().offset(index)
            due[step] = (*due.get(step, ()), index)
        return due

    def _schedule(self) -> Schedule:
        return Schedule(
            fragments=len(self.fragments),
            inner_steps=self.inner_steps,
            overlap_steps=self.overlap_steps,
            steps=1,
        )


def rounds_of(plan: Plan, workload: Workload, peers: int) -> PlannedRounds:
    """What one of `peers` workers sends by a plan.

    Each worker reduces 1/n of a fragment: it sends (n-1)/n of its contribution to the others'
    reducers, and its shard's reduction to n-1 peers. In each direction a round costs (n-1)/n of
    (encoded contribution + encoded reduction): 2(n-1)/n of the encoded fragment where both use one
    codec. In pairs each gives its partners its whole contribution when it is due, and its anchor
    ahead of that.

    Raises:
        ValueError: the plan does not fit the model: more fragments than layers, or than H.
    """
    exchanged = plan.exchange != "none" and peers > 1
    fragments = workload.fragments(plan.fragments, plan.pattern)
    plan.schedule(fragments=len(fragments), steps=1)  # checks, even where nothing is exchanged
    codecs = [codec_by_name(plan.codec), codec_by_name(plan.reduction_codec)]
    share, ahead_bits = (peers - 1) / peers, 0.0
    if plan.exchange == "pairs":
        share, anchors = min(plan.group_size, peers) - 1, codec_by_name(plan.anchor_codec)
        ahead_bits = 8 * share * sum(anchors.encoded_bytes(f.elements) for f in fragments)
        codecs = codecs[:1]
    return PlannedRounds(
        inner_steps=plan.inner_steps,
        overlap_steps=plan.overlap_steps,
        fragments=fragments if exchanged else (),
        fragment_bits=tuple(
            8 * share * sum(codec.encoded_bytes(f.elements) for codec in codecs)
            for f in fragments
            if exchanged
        ),
        ahead_bits=ahead_bits if exchanged else 0.0,
    )
