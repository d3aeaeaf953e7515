"""A whole run of a world of one beside a loop of plain torch over the same batches, on whichever device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardrun.config.load import from_mapping
from shardrun.data.loader import MicroBatchLoader
from shardrun.data.seeding import Purpose, derive_seed, seed_all
from shardrun.run.recipe import World, load_recipe
from tests.support.reference import PlainTorch
from tests.support.sessions import same_bits
from tests.support.training import document, trained

_GPT = str(Path(__file__).parents[2] / "recipes" / "gpt.py")
_ADAMW: dict[str, Any] = {"lr": 0.01, "betas": [0.9, 0.95], "weight_decay": 0.1}
_STEPS, _MAX_NORM = 5, 0.5
_BATCHES: dict[str, Any] = {"micro_batch_size": 2, "global_batch_size": 6}


def differing_from_plain_torch(folder: Path, backend: str, device: str, **precision: Any) -> list[str]:
    """Paths whose final bits differ between `shardrun train` and plain torch with fused AdamW: accumulation, dropout,
    clipping; `precision` is that section of the config, without 16-bit parameters."""
    return differing(small_gpt(folder, backend, precision=precision), device)


def differing(config: dict[str, Any], device: str) -> list[str]:
    """The same for a config that `small_gpt` made."""
    done = trained(config)
    expected = _plain(config, torch.device(device))
    found = done.model(_STEPS)
    assert found.keys() == expected.keys()
    assert all(row["grad_norm"] > _MAX_NORM for row in done.steps), "clipping was not active"
    return [path for path, tensor in expected.items() if not same_bits(found[path], tensor.cpu())]


def small_gpt(folder: Path, backend: str, **sections: dict[str, Any]) -> dict[str, Any]:
    """The config of such a run; `sections` are laid over it."""
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 80)
    args = {"layers": 2, "width": 16, "heads": 2, "context": 16, "dropout": 0.1, "text": str(folder / "text.txt")}
    base: dict[str, dict[str, Any]] = {
        "optimizer": {"name": "adamw", **_ADAMW},
        "train": {"steps": _STEPS, "max_grad_norm": _MAX_NORM, **_BATCHES},
        "data": {"shuffle": True},
        "topology": {"world_size": 1, "timeout_s": 30, "backend": backend},
    }
    laid_over = {name: {**base.get(name, {}), **section} for name, section in sections.items()}
    return document(folder / "run", 1, {**base, **laid_over}, _GPT, **args)


def _plain(document: dict[str, Any], device: torch.device) -> dict[str, Tensor]:
    """The final parameters by path."""
    config = from_mapping(document)
    recipe, world, seed = load_recipe(config.recipe, config.recipe_args), World(0, 1), config.run.seed
    seed_all(derive_seed(Purpose.MODEL, seed))
    model = recipe.build_model(world).to(device)
    plain = PlainTorch(dict(model.named_parameters()), torch.optim.AdamW, fused=True, **_ADAMW)
    loader = MicroBatchLoader(recipe.build_data("train"), recipe.collate, seed=seed, rank=0, world_size=1, **_BATCHES)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(config.precision.matmul)
    for step, (_, share) in zip(range(_STEPS), loader.windows(), strict=False):
        weight = 0
        for number, (inputs, labels) in share:
            seed_all(derive_seed(Purpose.MICRO_BATCH, seed, step, number))
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=config.precision.autocast == "bf16"):
                loss_sum, count = recipe.loss(model, (inputs.to(device), labels.to(device)), world)
            torch.autograd.backward(loss_sum)
            weight += int(count)
        plain.step(plain.take_gradients(), weight, max_grad_norm=_MAX_NORM)
    torch.set_float32_matmul_precision(before)
    return {path: parameter.detach() for path, parameter in model.named_parameters()}
