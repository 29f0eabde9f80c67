"""Every device gives the same bytes and values: one peer may encode where another cannot."""

import pytest
import torch

from algorithms.codecs import CODECS, Codec

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@needs_cuda
@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_cuda_gives_what_the_cpu_gives(codec: Codec, seed: int | None) -> None:
    elements = 3 * 4096 + 77
    values = torch.randn(elements, generator=torch.Generator().manual_seed(1)) * 1e-3
    here = codec.encode(values, seed)
    there = codec.encode(values.cuda(), seed)
    assert torch.equal(there.cpu(), here)
    assert torch.equal(codec.decode(there, elements).cpu(), codec.decode(here, elements))
