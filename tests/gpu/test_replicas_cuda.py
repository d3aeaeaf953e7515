"""The digest of a replica on a CUDA device is that of the same bytes on the CPU."""

from __future__ import annotations

import pytest
import torch

from shardrun.run.replicas import digest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch.cuda.is_available() is False"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (7,), (3, 5, 2), (16_384, 5), (9_000_001,)])
def test_a_digest_does_not_depend_on_the_device(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.randn(shape).to(dtype)
    assert digest(tensor.to("cuda")) == digest(tensor)
    if tensor.dim() == 3:
        assert digest(tensor.to("cuda").transpose(0, 1)) == digest(tensor.transpose(0, 1))
