"""The plan of a run: fragments x schedule x exchange x wire codec x outer update x merge.

DiLoCo, Streaming DiLoCo, NoLoCo, data-parallel and local training are settings of one engine. The
presets are these methods with the values that were found best for each, by name: all that an added
one needs is an entry in `PRESETS`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args, get_type_hints

from murmuration.algorithms import fragments as parts
from murmuration.algorithms.codecs import codec_by_name, has_few_bits
from murmuration.algorithms.diloco import MeanOver, Nesterov
from murmuration.algorithms.fragments import Fragment, TensorSpec
from murmuration.algorithms.noloco import GroupUpdate, ModifiedMomentum, SharedMomentum
from murmuration.algorithms.schedule import Schedule

Exchange = Literal["mean", "pairs", "none"]
Payload = Literal["pseudo_gradient", "gradient"]
Weighting = Literal["uniform", "work"]
Merge = Literal["reset", "keep"]
Overlap = Literal["fixed", "measured"]

_SHARD_BYTES = 56 * 1024
_MAX_CHUNKS_PER_PEER = 8

ANCHOR_CODECS = ("fp32", "bf16")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How the peers of a run exchange. Raises ValueError: what cannot work, with the fix."""

    inner_steps: int = 20  # H, inner steps between two rounds of one fragment
    fragments: int = 1  # or P fragments of layers plus one for the rest; 0 chooses P by the layers
    pattern: str = "strided"  # or `sequential`: of the layers in a fragment
    overlap_steps: int = 0  # tau, inner steps between sending and applying; peers may differ
    # `fixed`, a peer waits for what has not come after tau steps; or `measured`, it goes on
    # training until it comes, or the fragment is due again.
    overlap: Overlap = "fixed"
    # What a replica goes on from when a round is over: `reset`, the anchor; or `keep`, the anchor
    # minus what it has learned that is not in its contribution, encoded.
    merge: Merge = "reset"
    merge_alpha: float = 0.0  # share of the local parameters that survives a merge
    # Inner steps per period by speed: a peer half as fast as the fastest (of three or more, as the
    # second fastest) makes half as many, so that nobody waits for it (arXiv:2401.09135).
    dylu: bool = False
    # `uniform` means, or by `work`: the inner steps that a contribution stands for.
    weighting: Weighting = "uniform"
    # Each value's mean is over `all`, or over its `senders`: those whose contribution has it, for
    # codecs that leave values out.
    mean_over: MeanOver = "all"
    # `mean` over all; `pairs`: each round in random groups of `group_size`; or `none`.
    exchange: Exchange = "mean"
    # What is averaged; `gradient` is data-parallel training, every step.
    payload: Payload = "pseudo_gradient"
    codec: str = "fp32"  # wire codec of contributions
    # Wire codec of what comes back. What it leaves out the reducer adds to its next reduction.
    reduction_codec: str = "fp32"
    # The outer Nesterov step; with `pairs` b and a of heavy ball. The paper's 0.7 and 0.9 are too
    # hot for periods as short as the default.
    outer_lr: float = 0.9
    outer_momentum: float = 0.6
    outer_momentum_clip: float = 0.0  # see `Nesterov`, as for the next; 0 for none
    staleness_penalty: float = 0.0
    # With `pairs`, go on from the group's mean anchor and momentum; without it each replica keeps
    # its momentum to itself, which is NoLoCo.
    shared_momentum: bool = False
    outer_pull: float = 0.7  # NoLoCo's c, the pull to the group's mean anchor
    group_size: int = 2
    anchor_codec: str = "fp32"  # wire codec of the anchors, which only pairs exchange; fp32 or bf16
    # One exact mean after the last step. With `pairs` it is of everyone's anchors; without it
    # everyone ends with a model of its own. With merge `keep` it is of everyone's local parameters,
    # which have what the anchor lacks.
    consensus: bool = False

    def __post_init__(self) -> None:
        self.schedule(fragments=1, steps=1)  # the parts check their own values
        if self.fragments < 0:
            raise ValueError(f"fragments is {self.fragments}; it must be at least 1, or 0 for auto")
        for name in (self.codec, self.reduction_codec):
            codec_by_name(name)
        if not 0 <= self.merge_alpha < 1:
            raise ValueError(
                f"merge_alpha is {self.merge_alpha}; it must be in 0..1, below 1 (1 would be no "
                "communication: use the preset `local`)"
            )
        if self.payload == "gradient" and (self.dylu or self.weighting == "work"):
            raise ValueError(
                "averaging gradients in every step leaves no room for unequal work; leave out dylu "
                "and weighting"
            )
        if self.payload == "gradient" and (self.inner_steps, self.overlap_steps) != (1, 0):
            raise ValueError(
                "averaging gradients needs inner_steps = 1 and overlap_steps = 0; "
                "leave both out, or use the preset `diloco`"
            )
        known_of = {name: get_args(hint) for name, hint in get_type_hints(Plan).items()}
        for field, known in {**known_of, "pattern": ("strided", "sequential")}.items():
            if known and getattr(self, field) not in known:
                raise ValueError(
                    f"{field} is {getattr(self, field)!r}; use one of {', '.join(known)}"
                )
        exchanges = self.exchange != "none"
        if self.overlap == "measured" and self.overlap_steps == 0 and exchanges:
            raise ValueError(
                "a measured overlap grows from overlap_steps, which is 0: that is no overlap; make "
                "it at least 1, or use the preset `streaming`"
            )
        of_gradients = self.payload == "gradient"
        if self.keeps and (of_gradients or not exchanges):
            raise ValueError(
                'merge = "keep" is for pseudo-gradients, of which an encoding leaves something '
                'out; leave it out with gradients and with exchange = "none"'
            )
        if has_few_bits(self.codec) and exchanges and not (self.keeps or of_gradients):
            raise ValueError(
                f"{self.codec} leaves out most of what is learned, and nothing keeps that for the "
                'next round; set merge = "keep"'
            )
        if self.mean_over == "senders" and not self.compares_norms:
            raise ValueError(
                'mean_over = "senders" is for means of pseudo-gradients over all; leave it out'
            )
        self._check_outer()

    def _check_outer(self) -> None:
        if self.anchor_codec not in ANCHOR_CODECS:
            raise ValueError(
                f"anchor_codec is {self.anchor_codec!r}; use one of {', '.join(ANCHOR_CODECS)}: "
                "what replicas go on from is what comes through it"
            )
        stale = self.outer_momentum_clip != 0 or self.staleness_penalty != 0
        if stale and not self.compares_norms:
            raise ValueError(
                "outer_momentum_clip and staleness_penalty are for means of pseudo-gradients over "
                'all; leave both out with pairs, with gradients and with exchange = "none"'
            )
        if self.exchange != "pairs":
            _ = self.nesterov
            if self.consensus and not self.keeps:
                raise ValueError(
                    'consensus is for exchange = "pairs" and merge = "keep": any other mean over '
                    "all keeps one anchor, and nothing beside it; set consensus = false"
                )
            return
        self.group_update()
        if self.payload == "gradient":
            raise ValueError("pairs exchange pseudo-gradients: leave out payload")

    @property
    def nesterov(self) -> Nesterov:
        """The outer update of means over all. Raises ValueError: a value out of range."""
        clip, penalty = self.outer_momentum_clip, self.staleness_penalty
        return Nesterov(self.outer_lr, self.outer_momentum, clip, penalty)

    def group_update(self) -> GroupUpdate:
        """The outer update of pairs. Raises ValueError: replicas would drift apart with it."""
        if self.group_size < 2:
            raise ValueError(f"group_size is {self.group_size}; it must be at least 2 (a pair)")
        a, b = self.outer_momentum, self.outer_lr
        try:
            if self.shared_momentum:
                return SharedMomentum(a, b)
            return ModifiedMomentum(a, b, self.outer_pull, self.group_size)
        except ValueError as error:
            raise ValueError(
                f"a = outer_momentum, b = outer_lr, c = outer_pull: {error}"
            ) from error

    @property
    def consensus_plan(self) -> "Plan":
        """How what everyone has is averaged at the end of a run: exactly."""
        return Plan(inner_steps=self.inner_steps, outer_lr=1.0, outer_momentum=0.0)

    @property
    def keeps(self) -> bool:
        """Tells whether replicas keep what is not in their contribution."""
        return self.merge == "keep"

    @property
    def waits_for_nobody(self) -> bool:
        """Tells whether rounds close without peers that do not keep up: what these contribute comes
        with the next round, weighed by work or not."""
        return self.dylu and self.exchange == "mean"

    @property
    def compares_norms(self) -> bool:
        """Tells whether contributions come with their norms (`murmuration.algorithms.robust`), and
        those that contribute to a mean compute parts of it again."""
        return (self.exchange, self.payload) == ("mean", "pseudo_gradient")

    @property
    def keeps_reduction_residual(self) -> bool:
        """Tells whether requantizing the mean leaves something out."""
        return self.reduction_codec != "fp32"

    def chunks_per_peer(self, elements: int, peers: int) -> int:
        """The number of shards of a fragment that each peer reduces: links are busy both ways where
        there are several. Each is a stream, which takes about 4 ms of a core: with shards far below
        56 KiB, fast links wait for that; far above it, slow ones stand idle at each end."""
        shard_bytes = codec_by_name(self.codec).encoded_bytes(elements) / max(1, peers)
        return min(_MAX_CHUNKS_PER_PEER, max(1, round(shard_bytes / _SHARD_BYTES)))

    def shard_bounds(
        self, elements: int, peers: int, exact: int = 0
    ) -> tuple[tuple[int, int], ...]:
        """The ranges of a fragment's shards, on blocks of both codecs (powers of two). The values
        that travel as they are, `exact` of the last, are all in the last shard."""
        codecs = (codec_by_name(self.codec), codec_by_name(self.reduction_codec))
        align, coded = max(codec.block_elements for codec in codecs), elements - exact
        shards = peers * self.chunks_per_peer(coded, peers)
        *bounds, (start, _) = parts.shard_bounds(coded, shards, align)
        return (*bounds, (start, elements))

    @property
    def _in_pieces(self) -> bool:
        """Tells whether the whole model is exchanged, after one step, by a mean over all. Then it
        is cut for memory, and the cuts change no value. Pairs would meet others for each piece."""
        return self.fragments == 1 and self.exchange == "mean" and self.payload == "pseudo_gradient"

    def cut(self, schema: Sequence[TensorSpec]) -> tuple[Fragment, ...]:
        """The fragments of a model. Raises ValueError: it has fewer layers than fragments."""
        if self._in_pieces:
            return parts.pieces(schema, parts.PIECE_ELEMENTS)
        return parts.partition(schema, self.fragments, self.pattern)

    def schedule(self, *, fragments: int, steps: int) -> Schedule:
        """The rounds of a run of `steps` inner steps; `fragments`: how many there are in fact."""
        return Schedule(
            fragments=fragments,
            inner_steps=self.inner_steps,
            overlap_steps=self.overlap_steps,
            steps=steps,
            together=self._in_pieces,
        )


_DILOCO = Plan()

_STREAMING = replace(
    _DILOCO,
    inner_steps=50,
    fragments=0,
    overlap_steps=10,
    merge_alpha=0.5,
    codec="e3m0",
    reduction_codec="e3m0",
)

_NOLOCO = replace(
    _DILOCO,
    exchange="pairs",
    outer_lr=1.5,
    outer_momentum=0.3,
    shared_momentum=True,
    consensus=True,
)

# A sixteenth or less of fp32's bits leaves room for short periods at equal bytes. What a replica
# has not sent it keeps, and an overlap costs it more than `streaming`.
_ONE_BIT = replace(
    _DILOCO,
    inner_steps=28,
    fragments=0,
    overlap_steps=2,
    merge="keep",
    codec="sign",
    reduction_codec="sign",
    consensus=True,
)

PRESETS: dict[str, Plan] = {
    "diloco": _DILOCO,
    "streaming": _STREAMING,
    "co2": replace(  # what everyone has learned in a period is averaged during the next one
        _DILOCO,
        inner_steps=10,
        overlap_steps=10,
        merge="keep",
        outer_momentum_clip=0.01,
        staleness_penalty=1.0,
    ),
    "onebit": _ONE_BIT,
    "sparse": replace(
        _ONE_BIT,
        inner_steps=10,
        codec="topk128",
        reduction_codec="topk256",
        mean_over="senders",
        outer_lr=1.0,
        outer_momentum=0.0,
    ),
    "noloco": _NOLOCO,
    "streaming-noloco": replace(
        _NOLOCO,
        inner_steps=_STREAMING.inner_steps,
        fragments=_STREAMING.fragments,
        overlap_steps=_STREAMING.overlap_steps,
        codec=_STREAMING.codec,
        anchor_codec="bf16",
    ),
    "kseed": replace(_DILOCO, outer_lr=1.0, outer_momentum=0.0),
    "ddp": replace(_DILOCO, inner_steps=1, payload="gradient"),
    "local": replace(_DILOCO, exchange="none"),
}
