"""The norm's block sums: each block by itself, whatever stands beside it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardrun.step.norm import block_squares, clip_coefficient, norm_of


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 700), st.integers(0, 2**31), st.sampled_from([torch.float32, torch.bfloat16]))
def test_a_block_sum_depends_on_its_own_256_elements_only(blocks: int, seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    grad = (torch.randn(256 * blocks, generator=generator) * 3.0).to(dtype)
    whole = block_squares(grad)
    for cut in (1, 2, 5, 257):
        parts = [block_squares(part) for part in torch.split(grad, 256 * cut)]
        assert torch.equal(torch.cat(parts), whole)
    reference = [math.fsum(value * value for value in block) for block in grad.double().view(-1, 256).tolist()]
    assert whole.tolist() == pytest.approx(reference, rel=1e-13)


def test_the_norm_is_rounded_once_and_says_when_it_is_none() -> None:
    assert norm_of([1e16, 1.0, -0.0, 1.0, 1e-9]) == math.sqrt(1e16 + 2.0)
    assert math.isnan(norm_of([1.0, math.inf]))
    assert math.isnan(norm_of([math.nan, 1.0]))
    assert clip_coefficient(0.5, 1.0) == 1.0
    assert clip_coefficient(5.0, math.inf) == 1.0
    assert clip_coefficient(5.0, 1.0) == 1.0 / (5.0 + 1e-6)
