"""The norm's block sums: each block by itself, whatever stands beside it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardrun.step.norm import (
    LIMBS,
    block_squares,
    clip_coefficient,
    count_non_finite,
    exact_sum,
    from_limbs,
    norm_of,
    squares_of,
    to_limbs,
)


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


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 300), st.integers(0, 2**31), st.sampled_from([1e-45, 1e-38, 1e-20, 1.0, 1e19, 3e38]))
def test_the_sum_over_all_slices_is_exact_and_rounded_once(blocks: int, seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    grad = ((torch.rand(256 * blocks, generator=generator) - 0.5) * scale).float()
    grad[::3] *= 1e-6  # blocks of very different sizes
    whole = from_limbs(exact_sum(block_squares(grad)).tolist())
    cut = 256 * (seed % blocks)
    (low, _), (high, bad) = squares_of([grad[:cut]]), squares_of([grad[cut:]])
    added = [a + b for a, b in zip(to_limbs(low), to_limbs(high), strict=True)]  # as an all-reduce adds them
    assert bad == 0
    assert len(added) == LIMBS
    assert from_limbs(added) == whole
    assert norm_of(whole) == math.sqrt(math.fsum(block_squares(grad).tolist()))


def test_the_extremes_fit_and_a_single_bit_counts() -> None:
    largest = torch.full((256 * 64,), torch.finfo(torch.float32).max)
    total, _ = squares_of([largest] * 4)
    assert from_limbs(to_limbs(total * 2**20)) == total * 2**20  # a million ranks of them
    smallest = torch.zeros(256)
    smallest[5] = 2.0**-149
    assert norm_of(squares_of([smallest])[0]) == 2.0**-149
    assert squares_of([largest, smallest])[0] - squares_of([largest])[0] == 1 << 64
    assert squares_of([torch.zeros(0)]) == (0, 0)


def test_a_value_that_is_not_finite_is_counted_and_clipping_is_torchs() -> None:
    good, nan, inf = torch.ones(256), torch.full((256,), math.nan), torch.full((512,), -math.inf)
    assert squares_of([good, nan, inf])[1] == 3  # blocks of 256
    assert norm_of(squares_of([good, nan, inf])[0]) == 16.0
    assert squares_of([torch.cat([good, nan]), good])[1] == 1
    assert norm_of(squares_of([torch.cat([good, nan, good]), good, good])[0]) == 32.0
    large = torch.full((512,), torch.finfo(torch.float32).max)  # its sum is infinite, it is not
    assert count_non_finite([good, nan, large, inf]) == 2
    assert count_non_finite([]) == 0
    assert clip_coefficient(0.5, 1.0) == 1.0
    assert clip_coefficient(5.0, math.inf) == 1.0
    assert clip_coefficient(5.0, 1.0) == 1.0 / (5.0 + 1e-6)
