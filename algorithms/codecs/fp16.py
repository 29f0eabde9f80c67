"""IEEE half precision: eleven bits of precision, values below 65520 only."""

import torch

from algorithms.codecs.halves import Half


class FP16(Half):
    """Relative error at most 2^-11, absolute at most 2^-25 below 2^-14."""

    name = "fp16"
    wire_id = 3
    dtype = torch.float16
    limit = 65520.0 - 2.0**-8  # the largest fp32 number that does not become infinity
