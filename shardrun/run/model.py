"""From a recipe's model to the one that is trained: number format, start weights, freezing, equal replicas."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import UninitializedParameter
from torch.utils.checkpoint import checkpoint

from shardrun.comm.communicator import Communicator
from shardrun.errors import CheckpointError, ConfigError, ContractError
from shardrun.optim.kinds import OptionGroup
from shardrun.records.tensors import host_bytes
from shardrun.shard.contract import Contract
from shardrun.shard.selection import clean_path, named_parameters, path_in, pattern

PARAMETER_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def refuse_unfit(model: nn.Module) -> None:
    """Refuse by name what a run could not train, or could not put into a checkpoint and get back."""
    refuse_unsound(model)
    meta = [path for path, tensor in named_tensors(model).items() if tensor.device.type == "meta"]
    if meta:
        raise ConfigError(
            f"recipe: build_model left {meta[0]} and {len(meta) - 1} more on the meta device; give them values"
        )


def refuse_unsound(model: nn.Module) -> None:
    """As `refuse_unfit`, of a model that need not have values."""
    for path, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ConfigError(f"recipe: {path} has no shape yet; run one batch through the model in build_model")
    for path, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise ConfigError(
                f"recipe: {path or 'the model'} ({type(module).__name__}) keeps extra state, which no checkpoint "
                "holds; keep it in buffers"
            )


def place_model(model: nn.Module, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Move the model to the device of this rank and its floating parameters to `dtype`; Parameter objects stay.

    Buffers keep their formats, and so do the parameters of norms with running statistics, see `keeps_format`.
    """
    cast_parameters(model.to(device), dtype)
    return model


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Its floating parameters to `dtype`, on whichever device; see `place_model`."""
    # Only what differs is converted, so that a model that mixes formats on purpose keeps them at fp32.
    if dtype != torch.float32:
        kept = {id(p) for module in model.modules() if keeps_format(module) for p in module.parameters(recurse=False)}
        for parameter in model.parameters():
            if parameter.is_floating_point() and id(parameter) not in kept:
                parameter.data = parameter.data.to(dtype)


def keeps_format(module: nn.Module) -> bool:
    """Whether it is a norm with running statistics: torch takes 16-bit input there, but no 16-bit weights beside them.

    In bf16 the statistics themselves would stand still, because a small change of a mean is rounded away.
    """
    return isinstance(module, _NormBase) and module.running_mean is not None


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by clean path, aliases included: what a model file holds."""
    return {path: tensor.data for path, tensor in _stored(model).items()}


def named_buffers(model: nn.Module) -> dict[str, Tensor]:
    """All buffers by clean path, those that a state_dict leaves out included; tied ones once, as in `tied_names`."""
    buffers = _all_buffers(model)
    aliases = _aliases(buffers)
    return {path: buffer for path, buffer in sorted(buffers.items()) if path not in aliases}


def buffer_forms(model: nn.Module) -> dict[str, str]:
    """Shape and dtype of every buffer, in words, by the names of `named_buffers`."""
    return {path: f"{tuple(buffer.shape)} {buffer.dtype}" for path, buffer in named_buffers(model).items()}


def distinct_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """All parameters by clean path, sorted; tied ones once, as in `tied_names`."""
    parameters = dict(named_parameters(model))
    aliases = _aliases(parameters)
    return {path: parameter for path, parameter in sorted(parameters.items()) if path not in aliases}


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters, tied ones once."""
    return sum(parameter.nbytes for parameter in distinct_parameters(model).values())


def tied_names(model: nn.Module) -> dict[str, str]:
    """Further names of tensors that have several -> the first in sorted order, which is the one that is stored.

    Tied is what is the same Parameter, or the same buffer, under several names, as in a `Contract`.
    """
    return _aliases(_stored(model))


def _stored(model: nn.Module) -> dict[str, Tensor]:
    persistent = {path_in(model, path) for path in model.state_dict()}
    kept = {path: buffer for path, buffer in _all_buffers(model).items() if path in persistent}
    return {**dict(named_parameters(model)), **kept}


def _all_buffers(model: nn.Module) -> dict[str, Tensor]:
    return {path_in(model, path): buffer for path, buffer in model.named_buffers(remove_duplicate=False)}


def _aliases(held: Mapping[str, Tensor]) -> dict[str, str]:
    first: dict[int, str] = {}
    kept = {path: first.setdefault(id(tensor), path) for path, tensor in sorted(held.items())}
    return {path: name for path, name in kept.items() if name != path}


def init_from(model: nn.Module, path: Path, elsewhere: Collection[str] = ()) -> None:
    """Overwrite all parameters and persistent buffers with those of a plain safetensors file; misfits are all named.

    A tied tensor may be stored under any one of its names. Values are cast to the model's dtypes. `elsewhere`: names
    in the models of other ranks, which the file may have besides.
    """
    targets, aliases = named_tensors(model), tied_names(model)
    try:
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if name in targets or name not in elsewhere]  # noqa: SIM118
            problems = _init_misfits({name: file.get_slice(name).get_shape() for name in names}, targets, aliases)
            if problems:
                raise CheckpointError(f"init_from: {path} does not fit the model:\n  " + "\n  ".join(problems))
            for name in names:
                targets[name].copy_(file.get_tensor(name))
    except SafetensorError as error:
        raise CheckpointError(f"init_from: {path} is no sound safetensors file: {error}") from None


def _init_misfits(
    shapes: Mapping[str, Sequence[int]], targets: Mapping[str, Tensor], aliases: Mapping[str, str]
) -> list[str]:
    problems = [f"{name}: in the file, not in the model" for name in sorted(shapes.keys() - targets.keys())]
    held = {aliases.get(name, name) for name in shapes}
    for name, tensor in sorted(targets.items()):
        if aliases.get(name, name) not in held:
            problems.append(f"{name}: in the model, not in the file")
        elif name in shapes and tuple(shapes[name]) != tuple(tensor.shape):
            problems.append(f"{name}: file {tuple(shapes[name])}, model {tuple(tensor.shape)}")
    return problems


def freeze_unselected(model: nn.Module, selected: Collection[str]) -> dict[str, nn.Parameter]:
    """No gradient for what no group selects; returns it by clean path."""
    unselected = {path: parameter for path, parameter in named_parameters(model) if path not in selected}
    for parameter in unselected.values():
        parameter.requires_grad_(False)
    return unselected


def option_groups(
    options: Iterable[tuple[Sequence[str], dict[str, float], float]], contract: Contract
) -> list[OptionGroup]:
    """Option groups over the trainable parameters of `contract`, by the first path of each; any alias may be named.

    The first match has a parameter; a group that matches nothing is refused.
    """
    return [
        OptionGroup(matching(patterns, contract, f"optimizer.options.{number}.match"), given, lr_scale)
        for number, (patterns, given, lr_scale) in enumerate(options)
    ]


def matching(patterns: Sequence[str], contract: Contract, key: str) -> frozenset[str]:
    """First paths of the trainable parameters of which any name matches; ConfigError, at `key`, where none does."""
    first = {spec.path: contract.specs[spec.alias].path for spec in contract.specs if spec.trainable}
    matched = frozenset(first[path] for path in first if any(pattern(text).match(path) for text in patterns))
    if not matched:
        raise ConfigError(f"{key}: {list(patterns)} matches none of {len(first)} selected trainable parameters")
    return matched


def checkpoint_activations(model: nn.Module, patterns: Sequence[str]) -> int:
    """Compute the activations of matching modules again in backward; returns how many. Names stay as they are."""
    modules = [(clean_path(path), module) for path, module in model.named_modules(remove_duplicate=False) if path]
    chosen: dict[int, nn.Module] = {}
    for text in patterns:
        matched = {id(module): module for path, module in modules if pattern(text).match(path)}
        if not matched:
            count = len({path for path, _ in modules})
            raise ConfigError(f"train.activation_checkpointing: {text!r} matches none of {count} modules")
        chosen |= matched
    inner = {id(module) for outer in chosen.values() for module in outer.modules() if module is not outer}
    outermost = [module for key, module in chosen.items() if key not in inner]
    for module in outermost:
        # The instance attribute shadows the method: nothing is wrapped, so no parameter gets another path.
        module.forward = partial(checkpoint, module.forward, use_reentrant=False)
    return len(outermost)


def all_names(comm: Communicator, model: nn.Module) -> frozenset[str] | None:
    """Names of the tensors of all ranks' models; None where each rank has all of them. Collective."""
    names = sorted(named_tensors(model))
    if not comm.compare("names of the model", "", {"names": repr(names)}).differing:
        return None
    return frozenset().union(*comm.agree("names of all parts", names))


def compare_unselected(
    comm: Communicator, model: nn.Module, unselected: Mapping[str, nn.Parameter], sync: bool, *, apart: bool
) -> int:
    """Unselected parameters and all buffers must be the same on every rank; collective.

    A difference is refused naming the first tensor, or with `sync` overwritten by rank 0's. Returns how many differed.
    `apart`: a rank may be without what others have, its part of the model being another one.
    """
    replicated = {path: parameter.data for path, parameter in unselected.items()} | named_buffers(model)
    digests = {path: _digest(tensor) for path, tensor in sorted(replicated.items())}
    if not comm.compare("unselected", "", {"digests": repr(sorted(digests.items()))}).differing:
        return 0
    by_rank = comm.agree("unselected digests", digests)
    differing = [
        path
        for path in sorted(set().union(*by_rank))
        if len({held.get(path) for held in by_rank if path in held or not apart}) > 1
    ]
    if not differing:
        return 0
    misfits = [p for p in differing if len({str(h.get(p, "absent")).split(":")[0] for h in by_rank}) > 1]
    if misfits or not sync:
        first = (misfits or differing)[0]
        sides = "; ".join(f"rank {rank} has {held.get(first, 'nothing')}" for rank, held in enumerate(by_rank))
        way_out = "build the same model on every rank" + ("" if misfits else ", or set topology.sync_unselected: true")
        raise ContractError(
            f"{first} ({len(differing)} in all) differs between ranks though nothing trains it: {sides}; {way_out}"
        )
    for path in differing:
        tensor = replicated[path]
        wire = tensor.contiguous()
        comm.broadcast_(wire, path)
        tensor.copy_(wire)
    return len(differing)


def _digest(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}: sha256 {hashlib.sha256(host_bytes(tensor)).hexdigest()[:16]}"
