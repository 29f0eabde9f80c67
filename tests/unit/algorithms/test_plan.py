"""Plans: every value that cannot work is refused with the reason and the fix."""

import math

import pytest

from murmuration.algorithms.plan import Plan

SHARED = {"exchange": "pairs", "outer_momentum": 0.3, "shared_momentum": True}
PAIRS = {"exchange": "pairs", "outer_lr": 0.7, "outer_momentum": 0.5, "outer_pull": 0.7}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inner_steps": 0}, r"inner_steps \(H\) is 0; it must be at least 1"),
        ({"inner_steps": 5, "overlap_steps": 6}, r"overlap_steps \(tau\) is 6; .*inner_steps = 5"),
        ({"overlap_steps": -1}, r"overlap_steps \(tau\) is -1"),
        ({"merge_alpha": 1.0}, r"merge_alpha is 1\.0; .*use the preset `local`"),
        ({"merge_alpha": -0.1}, r"merge_alpha is -0\.1"),
        ({"merge_alpha": math.nan}, r"merge_alpha is nan"),
        ({"outer_lr": 0.0}, r"outer_lr is 0\.0; .*0\.7 is the usual value"),
        ({"outer_momentum": 1.0}, r"outer_momentum is 1\.0"),
        ({"outer_momentum_clip": -0.1}, r"outer_momentum_clip is -0\.1; it must be at least 0"),
        ({"staleness_penalty": math.inf}, r"staleness_penalty is inf; it must be at least 0"),
        ({**PAIRS, "staleness_penalty": 1.0}, r"are for means of .*leave both out with pairs"),
        ({"exchange": "none", "outer_momentum_clip": 1.0}, r"leave both out with pairs"),
        ({"codec": "fp5"}, r"unknown codec 'fp5'; use one of fp32, bf16"),
        ({"reduction_codec": "zip"}, r"unknown codec 'zip'"),
        ({"exchange": "ring"}, r"exchange is 'ring'; use one of mean, pairs, none"),
        ({"payload": "weights"}, r"payload is 'weights'; use one of pseudo_gradient, gradient"),
        ({"pattern": "zigzag"}, r"pattern is 'zigzag'; use one of strided, sequential"),
        ({"payload": "gradient"}, r"averaging gradients needs inner_steps = 1"),
        ({"payload": "gradient", "inner_steps": 1, "overlap_steps": 1}, r"overlap_steps = 0"),
        ({"overlap": "measured"}, r"grows from overlap_steps, which is 0.*at least 1"),
        ({"overlap": "late"}, r"overlap is 'late'; use one of fixed, measured"),
        ({"fragments": -2}, r"fragments"),
        ({"consensus": True}, r'consensus is for exchange = "pairs" and merge = "keep"'),
        ({"mean_over": "some"}, r"mean_over is 'some'; use one of all, senders"),
        ({"mean_over": "senders", "exchange": "pairs"}, r"mean_over = \"senders\" is for means of"),
        ({"mean_over": "senders", "payload": "gradient", "inner_steps": 1}, r"leave it out"),
        ({"merge": "take"}, r"merge is 'take'; use one of reset, keep"),
        ({"codec": "sign"}, r'sign leaves out most .*; set merge = "keep"'),
        ({"codec": "ternary", "merge_alpha": 0.5}, r'ternary .*; set merge = "keep"'),
        ({"codec": "topk256", "exchange": "pairs"}, r'topk256 .*; set merge = "keep"'),
        ({"merge": "keep", "exchange": "none"}, r"is for pseudo-gradients"),
        ({"merge": "keep", "payload": "gradient", "inner_steps": 1}, "out with gradients"),
        ({"anchor_codec": "fp5"}, r"anchor_codec is 'fp5'; use one of fp32, bf16"),
        ({**PAIRS, "outer_pull": 4.0}, r"c is 4\.0: .*radius \d.*stable value is c = [\d.]+"),
        ({**PAIRS, "outer_lr": 40.0}, r"b is 40\.0: .*radius \d.*stable value is b = [\d.]+"),
        ({**PAIRS, "outer_momentum": 1.0}, r"a is 1\.0; it must be in 0\.\.1"),
        ({**PAIRS, "outer_pull": 0.0}, r"c is 0\.0; it must be above 0"),
        ({**PAIRS, "group_size": 1}, r"group_size is 1; it must be at least 2"),
        ({**SHARED, "outer_momentum": 1.0}, r"a is 1\.0; it must be in 0\.\.1"),
        ({**SHARED, "outer_lr": 2.6}, r"b is 2\.6: .*radius 1; .*stable value is b = 2\.597"),
        ({**SHARED, "outer_lr": math.nan}, r"b is nan"),
        ({**PAIRS, "payload": "gradient", "inner_steps": 1}, r"pairs exchange pseudo-gradients"),
    ],
)
def test_what_cannot_work_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Plan(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"codec": "sign", "merge": "keep"},
        {"codec": "sign", "exchange": "none"},
        {"codec": "sign", "payload": "gradient", "inner_steps": 1},
        {"reduction_codec": "sign"},  # the reducer keeps what that leaves out
        {"outer_pull": 4.0},  # which pairs could not take
    ],
)
def test_what_can_work_is_taken(changes):
    Plan(**changes)
