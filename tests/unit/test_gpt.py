"""The language model recipe: shapes, causality, tying, and a loss that is a sum."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import default_collate

from shardrun.data.sources import IGNORE
from shardrun.errors import ConfigError
from shardrun.run.recipe import Recipe, World, load_recipe

SOURCE = str(Path(__file__).parents[2] / "recipes" / "gpt.py")
WORLD = World(0, 1)
SMALL: dict[str, Any] = {"context": 12, "layers": 2, "width": 24, "heads": 3}


def gpt(**changed: Any) -> Recipe:
    return load_recipe(SOURCE, {**SMALL, **changed})


def model_of(**changed: Any) -> nn.Module:
    torch.manual_seed(1)
    return gpt(**changed).build_model(WORLD)


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(256, (batch, length), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("mlp", ["swiglu", "gelu"])
@pytest.mark.parametrize("tied", [True, False])
def test_paths_are_those_that_selections_name(mlp: str, tied: bool) -> None:
    model = model_of(mlp=mlp, tied=tied)
    layer = {"attn_norm", "attn.qkv", "attn.out", "mlp_norm", "mlp.up", "mlp.down"} | (
        {"mlp.gate"} if mlp == "swiglu" else set()
    )
    expected = {f"blocks.{number}.{name}.weight" for number in range(2) for name in layer}
    expected |= {"embed.weight", "norm.weight", "head.weight"}
    assert {path for path, _ in model.named_parameters(remove_duplicate=False)} == expected
    assert not list(model.buffers())  # nothing that a cast could round or a checkpoint could miss
    assert (model.get_parameter("head.weight") is model.get_parameter("embed.weight")) == tied


@pytest.mark.parametrize("length", [1, 7, 12, 30])
def test_logits_for_any_length(length: int) -> None:
    logits = model_of()(tokens(3, length))
    assert logits.shape == (3, length, 256)
    assert logits.dtype == torch.float32


def test_a_new_model_knows_nothing_yet() -> None:
    recipe = gpt()
    loss_sum, weight = recipe.loss(model_of(), (tokens(4, 12), tokens(4, 12).flip(0)), WORLD)
    assert weight == 48
    assert loss_sum.item() / 48 == pytest.approx(math.log(256), rel=0.02)


def test_no_position_sees_what_comes_after_it() -> None:
    model = model_of().eval()
    seen = tokens(2, 12)
    changed = seen.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 256
    before, after = model(seen), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=1e-6)
    assert (before[:, 7:] != after[:, 7:]).any(dim=-1).all()


def test_positions_matter() -> None:
    model = model_of().eval()
    logits = model(torch.tensor([[5, 9, 5, 5], [9, 5, 5, 5]]))
    assert not torch.allclose(logits[0, -1], logits[1, -1], atol=1e-5)


def test_attention_depends_on_distance_and_not_on_place() -> None:
    recipe = gpt()
    rotate = recipe.module.rotate
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64).unbind(0)
    row_q, row_k = rotate(q.expand(1, 1, 20, 8)), rotate(k.expand(1, 1, 20, 8))
    scores = (row_q @ row_k.transpose(-1, -2))[0, 0]
    for distance in range(5):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(row_q.norm(dim=-1), q.norm(dim=-1).expand(1, 1, 20), rtol=1e-6, atol=1e-6)


def test_the_loss_is_the_sum_over_labelled_tokens() -> None:
    recipe, model = gpt(), model_of().eval()
    inputs, labels = tokens(3, 12), tokens(3, 12).roll(1, 0)
    labels[0, 5:] = IGNORE
    labels[2] = IGNORE
    loss_sum, weight = recipe.loss(model, (inputs, labels), WORLD)
    assert weight == 5 + 12
    log_probabilities = F.log_softmax(model(inputs).double(), dim=-1).detach()
    by_hand = sum(-log_probabilities[b, t, labels[b, t]] for b in range(2) for t in range(12) if labels[b, t] != IGNORE)
    assert loss_sum.item() == pytest.approx(float(by_hand), rel=1e-5)
    parts = [recipe.loss(model, (inputs[b : b + 1], labels[b : b + 1]), WORLD) for b in range(3)]
    assert sum(int(count) for _, count in parts) == weight
    assert sum(part.item() for part, _ in parts) == pytest.approx(loss_sum.item(), rel=1e-5)


def test_a_batch_without_labels_weighs_nothing_and_has_finite_zero_gradients() -> None:
    recipe, model = gpt(), model_of()
    loss_sum, weight = recipe.loss(model, (tokens(2, 12), torch.full((2, 12), IGNORE)), WORLD)
    loss_sum.backward()  # type: ignore[no-untyped-call]
    assert weight == 0
    assert loss_sum.item() == 0.0
    assert all((parameter.grad == 0).all() for parameter in model.parameters() if parameter.grad is not None)


def test_data_and_bits_per_byte() -> None:
    recipe = gpt(stride=6)
    train, val = recipe.build_data("train"), recipe.build_data("val")
    assert recipe.bytes_per_token == 1.0
    assert train.identity != val.identity
    assert len(gpt().build_data("train")) < len(train)
    assert len(gpt().build_data("val")) == len(val)  # validation counts every byte once, whatever the stride
    loss_sum, weight = recipe.loss(model_of(), default_collate([train[0], train[1]]), WORLD)
    assert (loss_sum.dim(), weight) == (0, 24)


def test_dropout_acts_in_training_only() -> None:
    model = model_of(dropout=0.3)
    assert not torch.equal(model(tokens(1, 12)), model(tokens(1, 12)))
    model.eval()
    assert torch.equal(model(tokens(1, 12)), model(tokens(1, 12)))


def test_bfloat16_parameters_keep_float32_losses() -> None:
    recipe, model = gpt(), model_of().to(torch.bfloat16)
    loss_sum, _ = recipe.loss(model, (tokens(2, 12), tokens(2, 12)), WORLD)
    assert loss_sum.dtype == torch.float32
    loss_sum.backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_few_updates_learn() -> None:
    recipe, model = gpt(), model_of()
    data = recipe.build_data("train")
    batch = default_collate([data[i] for i in range(4)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss_sum, weight = recipe.loss(model, batch, WORLD)
        optimizer.zero_grad()
        (loss_sum / weight).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss_sum.item() / int(weight))
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"width": 25}, "width 25 over 3 heads must give an even whole number per head"),
        ({"width": 27}, "width 27 over 3 heads"),
        ({"stride": 13}, "stride 13 is more than context 12"),
        ({"dropout": 1.0}, "recipe_args.dropout: Input should be less than 1"),
        ({"layer": 2}, "recipe_args.layer: unknown argument, found 2; did you mean 'layers'"),
        ({"mlp": "relu"}, "recipe_args.mlp: Input should be 'swiglu' or 'gelu'; found 'relu'"),
    ],
)
def test_arguments_that_cannot_work_are_refused(args: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        gpt(**args)
