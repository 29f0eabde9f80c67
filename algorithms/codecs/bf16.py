"""bfloat16: fp32's range, eight bits of precision."""

import torch

from algorithms.codecs.halves import Half


class BF16(Half):
    """Relative error at most 2^-8."""

    name = "bf16"
    wire_id = 2
    dtype = torch.bfloat16
    limit = 2.0**128 - 2.0**119 - 2.0**104  # the largest fp32 number that does not become infinity
