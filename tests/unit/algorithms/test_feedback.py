"""Error feedback: what one encoding leaves out comes with the next, and nothing comes twice."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from algorithms.codecs import codec_by_name
from algorithms.diloco import keep_residual, with_residual


def test_the_first_contribution_is_sent_as_it_is() -> None:
    g = torch.tensor([1.0, -2.0])
    assert with_residual(g, None, 0.5) is g


def test_later_ones_come_with_the_decayed_residual() -> None:
    g, residual = torch.tensor([1.0, -2.0]), torch.tensor([4.0, 8.0])
    values = with_residual(g, residual, 0.25)
    assert values.tolist() == [2.0, 0.0]
    assert (g.tolist(), residual.tolist()) == ([1.0, -2.0], [4.0, 8.0])  # untouched


def test_what_was_not_counted_keeps_its_residual() -> None:
    before = torch.tensor([1.0, 2.0, 3.0, 4.0])
    error = torch.tensor([0.1, 0.2, 0.3, 0.4])
    assert keep_residual(error.clone(), before, ()).tolist() == error.tolist()
    kept = keep_residual(error.clone(), before, [(0, 1), (2, 4)])
    assert torch.equal(kept, torch.tensor([1.0, 0.2, 3.0, 4.0]))
    kept = keep_residual(error.clone(), None, [(1, 3)])
    assert torch.equal(kept, torch.tensor([0.1, 0.0, 0.0, 0.4]))


@given(
    st.sampled_from(["bf16", "fp16", "int8", "int4", "e3m0", "topk"]),
    st.booleans(),
    st.integers(1, 200),
)
def test_what_was_sent_and_what_is_left_are_what_was_learned(
    name: str, stochastic: bool, elements: int
) -> None:
    """Without decay: sum of what others decode + residual = sum of g, whatever the codec."""
    codec = codec_by_name(name)
    generator = torch.Generator().manual_seed(elements)
    learned = sent = torch.zeros(elements, dtype=torch.float64)
    residual = None
    for round_ in range(8):
        g = torch.randn(elements, generator=generator)
        values = with_residual(g, residual, 1.0)
        decoded = codec.decode(codec.encode(values, round_ if stochastic else None), elements)
        residual = keep_residual(values - decoded, residual, ())
        learned, sent = learned + g, sent + decoded
    assert residual is not None
    # Each sum and difference rounds to fp32: a few units in the last place of the largest.
    assert torch.allclose(sent + residual, learned, rtol=0, atol=1e-5)
