"""A checkpoint as one file of `torch.save`: the model, and the optimizer state by parameter name."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardrun.checkpoint.assemble import Whole, assemble
from shardrun.checkpoint.export import Exported, exported, exported_folder, model_entries, sound_manifest
from shardrun.checkpoint.manifest import understood
from shardrun.checkpoint.read import read_verified
from shardrun.errors import CheckpointError
from shardrun.records.durable import create_file, sync_file
from shardrun.records.record import record_key
from shardrun.shard.layout import FlatLayout

TORCH_FILE = "checkpoint.pt"
_MASTER = "master"
_NUMBERS = {"int": int, "float": float, "bool": bool}
_OF_THE_RUN = ("step", "counters", "schedule", "data", "config")


def export_torch(source: Path, target: Path) -> Exported:
    """Write TARGET/checkpoint.pt, which `torch.load(..., weights_only=True)` reads; what is in it, by key:

    `model`: a state dict of all names; tied names share one tensor. `optimizer`: `state`, path -> what torch.optim
    keeps for that parameter, in its shape, and `param_groups`, whose `params` are paths: the form of
    torch.distributed.checkpoint.state_dict. There a tied parameter stands under all of its names, for which of them
    torch asks depends on the model. `masters`: FP32 master weights by path, where there are any. `step`,
    `counters`, `schedule`, `data`, `config`: as in the manifest. Needs the memory of the whole state twice.
    """
    manifest = sound_manifest(source)
    with understood(source):
        saved = _state_dict(source, manifest)
    with exported_folder(source, manifest, target) as copier:
        descriptor = create_file(copier.staging / TORCH_FILE)
        with os.fdopen(descriptor, "wb") as file:
            torch.save(saved, file)
            file.flush()
            sync_file(descriptor, copier.staging / TORCH_FILE)
    return exported(target, manifest)


def _state_dict(source: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    saved: dict[str, Any] = {key: manifest[key] for key in _OF_THE_RUN if key in manifest}
    parts = [read_verified(source, entry)[1] for entry in model_entries(source, manifest)]
    saved["model"] = {name: tensor for part in parts for name, tensor in part.items()}
    saved["model"] |= {alias: saved["model"][name] for alias, name in manifest["aliases"].items()}
    saved |= {"optimizer": {"state": {}, "param_groups": []}, "masters": {}}
    for name in manifest["groups"]:
        _add_group(saved, source, manifest, name)
    _add_ties(saved, manifest["aliases"])
    return saved


def _add_ties(saved: dict[str, Any], aliases: Mapping[str, str]) -> None:
    """Give what stands under one name of a tied parameter to the others too."""
    ties: dict[str, list[str]] = {}
    for alias, name in aliases.items():
        ties.setdefault(name, [name]).append(alias)
    for names in ties.values():
        for by_name in (saved["optimizer"]["state"], saved["masters"]):
            for value in [by_name[name] for name in names if name in by_name]:
                by_name |= dict.fromkeys(names, value)
        for group in saved["optimizer"]["param_groups"]:
            if not {*names}.isdisjoint(group["params"]):
                group["params"] += [name for name in names if name not in group["params"]]


def _add_group(saved: dict[str, Any], source: Path, manifest: Mapping[str, Any], group: str) -> None:
    headers, tensors = {}, {}
    for entry in manifest["files"]:
        if entry["role"] == "record" and entry["group"] == group:
            headers[entry["path"]], tensors[entry["path"]] = read_verified(source, entry)
    groups, state = saved["optimizer"]["param_groups"], saved["optimizer"]["state"]
    named = {path for one in groups for path in one["params"]}
    own = _param_groups(manifest["groups"][group], _asked(manifest.get("config", {}), group))
    if twice := sorted(named & {path for one in own for path in one["params"]}):
        raise CheckpointError(f"{twice[0]} is in two groups of {source}; a state dict has one state of a name")
    groups += own
    for whole in assemble(manifest, group, headers):
        if gaps := whole.gaps():
            raise CheckpointError(f"{source}: {gaps[0]}")
        path, key = record_key(whole.name)
        value = _joined(whole, tensors)
        if key == _MASTER:
            saved["masters"][path] = value
            continue
        plain, _, kind = key.partition(":")
        state.setdefault(path, {})[plain] = _NUMBERS[kind](value.item()) if kind else value


def _joined(whole: Whole, tensors: Mapping[str, Mapping[str, Tensor]]) -> Tensor:
    pieces = [tensors[piece.path][whole.name].reshape(-1) for piece in whole.pieces]
    return torch.cat(pieces).reshape(whole.shape)


def _asked(config: Mapping[str, Any], group: str) -> Mapping[str, Any]:
    """What the config says of the optimizer of a group; the sets of ranks of one have records as NAME-0, NAME-1, ..."""
    if groups := config.get("groups"):
        found: Mapping[str, Any] = (groups.get(group) or groups[group.rpartition("-")[0]])["optimizer"]
        return found
    return config.get("optimizer") or {}


def _param_groups(section: Mapping[str, Any], asked: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The param groups as torch.optim would have them, by path; `lr` is the base rate, schedules aside."""
    optimizer = section["optimizer"]
    members: dict[int, list[str]] = {}
    for space in FlatLayout.from_json(section["layout"]).spaces:
        members.setdefault(space.option_group, []).extend(placed.path for placed in space.parameters)
    first: Sequence[Mapping[str, Any]] = optimizer["groups"]
    groups = []
    for number, paths in sorted(members.items()):
        rest = number >= len(first) and "rest" in optimizer
        options = dict((optimizer["rest_groups"] if rest else first)[number % len(first)])
        rate = (asked.get("rest") or {}).get("lr") if rest else None
        rate, scale = rate if rate is not None else asked.get("lr"), options.pop("lr_scale", 1.0)
        told = {} if rate is None else {"lr": rate * scale}
        groups.append({"params": paths, "optimizer": optimizer["rest" if rest else "name"], **told, **options})
    return groups
