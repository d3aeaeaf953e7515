"""What autocast and 16-bit parameters cost a step in casts: no more than with torch's own parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardrun as sr
from tests.support.sessions import make_zero2

SHAPE = (13, 13)
MICRO_BATCHES = 3


class Twice(nn.Module):
    """One weight, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(13) + 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.weight), self.weight)


class Casts(TorchDispatchMode):
    """Counts casts and copies of tensors of the weight's shape by (from, to)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: Counter[tuple[torch.dtype, torch.dtype]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        source = {"_to_copy": 0, "clone": 0, "copy_": 1}.get(func.overloadpacket.__name__)
        if source is not None and tuple(args[source].shape) == SHAPE:
            self.seen[args[source].dtype, result.dtype] += 1
        return result


def casts_of_a_window(model: nn.Module, autocast: bool) -> Counter[tuple[torch.dtype, torch.dtype]]:
    casts = Casts()
    with casts:
        for number in range(MICRO_BATCHES):
            x = torch.full((2, 13), 0.5 + number, dtype=next(model.parameters()).dtype)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                torch.autograd.backward(model(x).float().sum())
    return casts.seen


def test_autocast_casts_a_weight_once_per_micro_batch_and_its_gradient_once() -> None:
    plain, model = Twice(), Twice()
    zero2 = make_zero2(sr.Communicator.single(), model)
    seen = casts_of_a_window(model, autocast=True)
    assert seen[torch.float32, torch.bfloat16] == MICRO_BATCHES
    assert seen[torch.bfloat16, torch.float32] == MICRO_BATCHES
    assert seen[torch.float32, torch.bfloat16] == casts_of_a_window(plain, autocast=True)[torch.float32, torch.bfloat16]
    zero2.step(local_weight=2 * MICRO_BATCHES)
    assert casts_of_a_window(model, autocast=True) == seen, "parameters are still leaves after a step"


@pytest.mark.parametrize("masters", [True, False])
def test_a_gradient_of_a_16_bit_weight_is_cast_once_for_each_use(masters: bool) -> None:
    model = Twice().to(torch.bfloat16)
    zero2 = make_zero2(sr.Communicator.single(), model, masters=masters)
    for _ in range(2):
        seen = casts_of_a_window(model, autocast=False)
        assert seen[torch.bfloat16, torch.float32] == 2 * MICRO_BATCHES
        assert seen[torch.float32, torch.float32] == 1, "the first gradient is copied into its range, the others added"
        assert len(seen) == 2
        zero2.step(local_weight=2 * MICRO_BATCHES)
