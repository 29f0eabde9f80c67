"""The presets: each method as a plan with the values that were found best for it, by name.

To add one, add an entry to `PRESETS`: workers, `murmur swarm`, `murmur plan` and `make bench` know
it then. `murmur simulate` knows one preset of each way to exchange.
"""

from dataclasses import replace

from murmuration.algorithms.plan import Plan

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
# What everyone has learned in a period is averaged during the next one. Replicas keep what is on
# its way, so it is the anchor alone that is a period late.
_CO2 = replace(
    _DILOCO,
    inner_steps=10,
    overlap_steps=10,
    merge="keep",
    outer_momentum_clip=0.01,
    staleness_penalty=1.0,
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
_SPARSE = replace(
    _ONE_BIT,
    inner_steps=10,
    codec="topk128",
    reduction_codec="topk256",
    mean_over="senders",
    outer_lr=1.0,
    outer_momentum=0.0,
)

PRESETS: dict[str, Plan] = {
    "diloco": _DILOCO,
    "streaming": _STREAMING,
    "co2": _CO2,
    "onebit": _ONE_BIT,
    "sparse": _SPARSE,
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
