"""Which key was meant by one that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel

from shardrun.config.document import KeyPath
from shardrun.config.matrices import Factory
from shardrun.config.optimizers import FACTORY, OPTIMIZERS, chosen
from shardrun.config.rest import RESTS
from shardrun.config.schema import Config
from shardrun.config.section import keys_of

MODELS: dict[str, type[BaseModel]] = {**OPTIMIZERS, FACTORY: Factory}
"""Every model of an optimizer section, by what `chosen` tells."""

# What other tools call our keys.
SYNONYMS = {
    "async_save": "checkpoint.async",
    "accumulation": "train.global_batch_size",
    "accumulation_steps": "train.global_batch_size",
    "batch_size": "train.micro_batch_size",
    "beta1": "optimizer.betas",
    "beta2": "optimizer.betas",
    "clip_grad_norm": "train.max_grad_norm",
    "dtype": "precision.parameters",
    "float32_matmul_precision": "precision.matmul",
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
    "tf32": "precision.matmul",
    "torch_compile": "train.compile",
    "warmup": "schedule.warmup_steps",
    "weight_decay": "optimizer.weight_decay",
}


def meant(path: KeyPath, data: Any) -> str:
    """The advice for the unknown key at `path` of the document `data`: the key that was probably meant."""
    if path[0] == "groups" and len(path) > 2:
        return meant(path[2:], data["groups"][path[1]])  # a group has the sections that one group has at the top level
    name = str(path[-1]).lower().replace("-", "_")
    section = ".".join(str(part) for part in path[:-1] if isinstance(part, str))
    optimizer = data.get("optimizer") if isinstance(data, Mapping) else None
    if text := _of_another(name, section, optimizer):
        return text
    known = list(dict.fromkeys(_known(optimizer)))
    if name in known:
        outer, _, leaf = name.rpartition(".")
        return f"write {leaf} inside the section {outer}" if outer else f"{name} has its place at the top level"
    elsewhere = [key for key in known if _leaf(key) == name]
    if elsewhere:
        return f"did you mean {_joined(elsewhere, 'or')}? ({name} has its place there)"
    near = _nearest(name, {_leaf(key): key for key in known if _section(key) == section}, cutoff=0.7)
    near = near or _nearest(name, {**{_leaf(key): key for key in known}, **SYNONYMS}, cutoff=0.75)
    if near:
        return f"did you mean {near}?"
    here = [_leaf(key) for key in known if _section(key) == section]
    return f"known here: {', '.join(here)}"


def _of_another(name: str, section: str, optimizer: Any) -> str:
    """The advice if the key belongs to other optimizers than the one that its section is about."""
    models, at = (MODELS, optimizer) if section == "optimizer" else (RESTS, _rest(optimizer))
    if section not in ("optimizer", "optimizer.rest") or not isinstance(at, Mapping):
        return ""
    about = chosen(at)
    if about == FACTORY and name == "name":
        return "factory stands in the place of name; keep one of them"
    owners = [_told(key) for key, model in models.items() if name in model.model_fields]
    if not owners:
        return ""
    if about == FACTORY:
        return f"write {name} inside optimizer.factory_options if {at['factory']} takes it"
    inside = any(name in model.model_fields for model in RESTS.values())
    hint = "; for what muon leaves, write it inside optimizer.rest" if about == "muon" and inside else ""
    return f"{name} is a key of {_joined(owners, 'and')}, and {section}.name is {about}{hint}"


def _told(model: str) -> str:
    return "an optimizer of the recipe (factory)" if model == FACTORY else model


def _rest(optimizer: Any) -> Any:
    return optimizer.get("rest") if isinstance(optimizer, Mapping) else None


def _known(optimizer: Any) -> Iterator[str]:
    """Every dotted key of the schema, with those of the chosen optimizer (of all if there is none)."""
    for name, field in Config.model_fields.items():
        yield name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from (f"{name}.{key}" for key in keys_of(field.annotation))
    for model in _models(MODELS, optimizer):
        yield from (f"optimizer.{key}" for key in model.model_fields)
        (group, _) = get_args(model.model_fields["options"].annotation)
        yield from (f"optimizer.options.{key}" for key in group.model_fields)
        if "rest" in model.model_fields:
            yield from (f"optimizer.rest.{key}" for m in _models(RESTS, _rest(optimizer)) for key in m.model_fields)


def _models(models: Mapping[str, type[BaseModel]], section: Any) -> list[type[BaseModel]]:
    about = chosen(section) if isinstance(section, Mapping) else None
    return [models[about]] if about is not None and about in models else [*models.values()]


def _section(key: str) -> str:
    return key.rpartition(".")[0]


def _leaf(key: str) -> str:
    return key.rpartition(".")[2]


def _nearest(name: str, candidates: Mapping[str, str], *, cutoff: float) -> str:
    found = difflib.get_close_matches(name, candidates, n=1, cutoff=cutoff)
    return candidates[found[0]] if found else ""


def _joined(words: list[str], conjunction: str) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {conjunction} {words[-1]}"
