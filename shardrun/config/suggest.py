"""Which key was meant by one that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from shardrun.config.document import KeyPath
from shardrun.config.optimizers import SGD, Adam, AdamOptionGroup, AdamW, OptionGroup
from shardrun.config.schema import Config

OPTIMIZERS: dict[str, type[BaseModel]] = {"adamw": AdamW, "adam": Adam, "sgd": SGD}

# What other tools call our keys.
SYNONYMS = {
    "accumulation": "train.global_batch_size",
    "accumulation_steps": "train.global_batch_size",
    "batch_size": "train.micro_batch_size",
    "beta1": "optimizer.betas",
    "beta2": "optimizer.betas",
    "clip_grad_norm": "train.max_grad_norm",
    "dtype": "precision.parameters",
    "gradient_accumulation_steps": "train.global_batch_size",
    "gradient_checkpointing": "train.activation_checkpointing",
    "learning_rate": "optimizer.lr",
    "max_epochs": "train.epochs",
    "max_steps": "train.steps",
    "model": "recipe",
    "num_epochs": "train.epochs",
    "num_train_epochs": "train.epochs",
    "num_workers": "data.workers",
    "output_dir": "run.dir",
    "per_device_train_batch_size": "train.micro_batch_size",
    "save_every": "checkpoint.every",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "scheduler": "schedule.name",
    "warmup": "schedule.warmup_steps",
    "weight_decay": "optimizer.weight_decay",
}


def meant(path: KeyPath, data: Any) -> str:
    """The advice for the unknown key at `path` of the document `data`: the key that was probably meant."""
    name = str(path[-1]).lower().replace("-", "_")
    section = ".".join(str(part) for part in path[:-1] if isinstance(part, str))
    optimizer = data.get("optimizer") if isinstance(data, Mapping) else None
    chosen = optimizer.get("name") if isinstance(optimizer, Mapping) else None
    if not isinstance(chosen, str):  # wrong itself, and told as that
        chosen = None
    known = list(_known(chosen))
    if section == "optimizer" and (owners := [key for key, model in OPTIMIZERS.items() if name in model.model_fields]):
        return f"{name} is a key of {' and '.join(owners)}, and optimizer.name is {chosen}"
    if name in known:
        outer, _, leaf = name.rpartition(".")
        return f"write {leaf} inside the section {outer}" if outer else f"{name} has its place at the top level"
    elsewhere = [key for key in known if _leaf(key) == name]
    if elsewhere:
        return f"did you mean {_either(elsewhere)}? ({name} has its place there)"
    near = _nearest(name, {_leaf(key): key for key in known if _section(key) == section}, cutoff=0.7)
    near = near or _nearest(name, {**{_leaf(key): key for key in known}, **SYNONYMS}, cutoff=0.75)
    if near:
        return f"did you mean {near}?"
    here = [_leaf(key) for key in known if _section(key) == section]
    return f"known here: {', '.join(here)}"


def _known(chosen: Any) -> Iterator[str]:
    """Every dotted key of the schema, with those of the chosen optimizer (of all if there is none)."""
    for name, field in Config.model_fields.items():
        yield name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from (f"{name}.{key}" for key in field.annotation.model_fields)
    models = [OPTIMIZERS[chosen]] if chosen in OPTIMIZERS else [*OPTIMIZERS.values()]
    yield from dict.fromkeys(f"optimizer.{key}" for model in models for key in model.model_fields)
    option = OptionGroup if chosen == "sgd" else AdamOptionGroup
    yield from (f"optimizer.options.{key}" for key in option.model_fields)


def _section(key: str) -> str:
    return key.rpartition(".")[0]


def _leaf(key: str) -> str:
    return key.rpartition(".")[2]


def _nearest(name: str, candidates: Mapping[str, str], *, cutoff: float) -> str:
    found = difflib.get_close_matches(name, candidates, n=1, cutoff=cutoff)
    return candidates[found[0]] if found else ""


def _either(keys: list[str]) -> str:
    return keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])} or {keys[-1]}"
