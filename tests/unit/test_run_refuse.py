"""Models that a run refuses at set-up, by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardrun as sr
from shardrun.errors import ConfigError, SelectionError, StepRefused
from shardrun.run.model import refuse_unfit
from tests.support.sessions import make_zero2


class Remembers(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"seen": 3}


def test_extra_state_is_refused_naming_the_module() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Remembers(2, 2))
    with pytest.raises(ConfigError, match=r"1 \(Remembers\) keeps extra state"):
        refuse_unfit(model)
    refuse_unfit(nn.Sequential(nn.Linear(2, 2)))


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_parameter_without_a_shape_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"0\.weight has no shape yet"):
        refuse_unfit(nn.Sequential(nn.LazyLinear(2)))


def test_an_expanded_parameter_is_refused() -> None:
    model = nn.Module()
    model.w = nn.Parameter(torch.ones(1).expand(3))
    with pytest.raises(SelectionError, match="elements of w share memory"):
        sr.select_parameters(model)


def test_a_parameter_that_is_replaced_after_set_up_refuses_the_step() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    zero2 = make_zero2(sr.Communicator.single(), model, lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    zero2.step(local_weight=1)
    model[0].weight = nn.Parameter(torch.zeros(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(StepRefused, match=r"0\.weight: the model holds another object"):
        zero2.step(local_weight=1, missing="zero")
