"""Ranks that exchange tokens inside the model, of which some have fewer micro-batches than others, or none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import ROOT
from tests.support.training import document, train, trained

pytestmark = pytest.mark.sample(3)
_RECIPE = f"""
import sys
sys.path.insert(0, {str(ROOT / "recipes")!r})
import pydantic
import torch
import torch.distributed as dist
from moe import exchange

class Args(pydantic.BaseModel):
    pass

def build_model(args, world):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    return model

def build_data(args, split):
    return [torch.full((1,), float(number)) for number in range(1, 7)]

def swapped(rows, world, back=None):
    \"\"\"Rows to the other rank of the pair, and how many went and came.\"\"\"
    group = world.group("pair")
    if group is None:
        return rows, None
    counts = [torch.zeros((), dtype=torch.int64) for _ in range(2)]
    dist.all_gather(counts, torch.tensor(len(rows)), group=group)
    other = 1 - world.coordinates["pair"]
    sent, received = [0, 0], [0, 0]
    sent[other], received[other] = len(rows), int(counts[other])
    return exchange(rows, sent, received, group), (received, sent, group)

def loss(model, batch, world):
    there, way = swapped(batch, world)
    done = model(there)
    return (done if way is None else exchange(done, *way)).sum(), len(batch)
"""


def config(folder: Path, pair: int, samples: int, changed: str = "", **sections: Any) -> dict[str, Any]:
    """One window of so many samples of the mean of x * weight; each rank's samples go through its peer's weight."""
    recipe = folder / "exchange.py"
    folder.mkdir(exist_ok=True)
    recipe.write_text(_RECIPE + changed)
    train_section = {"micro_batch_size": 1, "global_batch_size": samples, "max_grad_norm": 100.0}
    return document(
        folder, pair, {"topology": {"axes": {"pair": pair}}, "train": train_section, **sections}, str(recipe)
    )


@pytest.mark.parametrize(("samples", "mean"), [(1, 1.0), (3, 2.0)])
def test_gradients_count_wherever_the_samples_are(tmp_path: Path, samples: int, mean: float) -> None:
    """A rank without a sample has the gradient of what its peer sent, also of weights that all ranks hold."""
    for pair in (1, 2):
        done = trained(config(tmp_path / str(pair), pair, samples))
        assert done.model(1)["weight"].item() == 1.0 - mean
        assert done.steps[0]["grad_norm"] == mean


def test_gradients_of_sums_count_wherever_the_samples_are(tmp_path: Path) -> None:
    groups = {"all": {"reduce": "sum", "optimizer": {"name": "sgd", "lr": 1.0}}}
    summed = {**config(tmp_path, 2, 1), "groups": groups}
    del summed["optimizer"]
    assert trained(summed).model(1)["weight"].item() == 0.0


_NO_GRADIENT = """
with_gradient = loss
def loss(model, batch, world):
    with torch.set_grad_enabled(torch.is_grad_enabled() and len(batch) > 0):
        return torch.zeros((), requires_grad=len(batch) > 0) * model.weight.sum(), len(batch)
"""
_A_SCALAR = """
only_rows = loss
def collate(samples):
    return {"rows": torch.stack(samples), "temperature": torch.tensor(1.0)}
def loss(model, batch, world):
    return only_rows(model, batch["rows"] * batch["temperature"], world)
"""
_A_WEIGHT = """
honest = loss
def loss(model, batch, world):
    return honest(model, batch, world)[0], 1
"""


@pytest.mark.parametrize("changed", [_NO_GRADIENT, _A_SCALAR])
def test_batches_without_rows_go_through_the_model(tmp_path: Path, changed: str) -> None:
    assert trained(config(tmp_path, 2, 3, changed)).steps[0]["tokens"] == 3


def test_a_batch_without_rows_has_no_weight(tmp_path: Path) -> None:
    refused = train(config(tmp_path, 2, 3, _A_WEIGHT))
    assert any("loss gives an empty micro-batch the weight 1, expected 0" in error for error in refused.errors)
    assert 2 in refused.codes
